"""Run by test_tensor_parallel.py in a process of its own: two ranks, an engine in its own process, a disk tier."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_CPU_OMP_THREADS_BIND="0|1")


def main(model: str, disk: str) -> None:
    from vllm import LLM, SamplingParams

    from hotspan.bench.prose import prose
    from hotspan.config.settings import CacheOptions
    from hotspan.engine.arguments import transfer_config

    # A MiB a chunk in float32, over both ranks: RAM holds 16 chunks.
    settings = CacheOptions(ram_gib=16 / 1024, disk=Path(disk), disk_gib=0.25).settings()
    settings = dataclasses.replace(settings, patience_s=10.0)  # see rig.py
    llm = LLM(
        model,
        dtype="float32",
        tensor_parallel_size=2,
        max_model_len=4096,
        block_size=128,
        num_gpu_blocks_override=48,
        gpu_memory_utilization=0.2,
        enforce_eager=True,
        prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=transfer_config(settings),
    )
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)

    def ask(seed: int) -> dict[str, object]:
        prompt = llm.get_tokenizer().encode(prose(seed, 3000))[:2900]
        output = llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]
        time.sleep(0.3)  # stores end in other processes
        return {"cached": output.num_cached_tokens, "tokens": list(output.outputs[0].token_ids)}

    answers = {"cold": ask(1), "own": ask(1)}
    llm.reset_prefix_cache()
    answers["ram"] = ask(1)
    for other in (2, 3):
        ask(other)
    llm.reset_prefix_cache()
    answers["disk"] = ask(1)
    print("ANSWERS " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
