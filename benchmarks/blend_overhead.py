"""What blending costs in CPU-seconds where nothing matches: prompts with it and without, in one process, in pairs.

usage: python -m benchmarks.blend_overhead [--pairs 16] [--tokens 2048] [--output FILE]

One engine with RAM and blending over the demo's model. Every prompt is new. Before each, blending is put in, or taken
out of the engine's scheduler; which of a pair is first alternates. CPU-seconds are those of the whole process, until
the engine is at rest again; the median of the ratios within a pair is reported.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from kit.measure import paired_ratio

_OUTPUT_TOKENS = 16
_HANG_S = 60.0


def settle(core: Any) -> None:
    """Let the engine's copies end."""
    deadline = time.monotonic() + _HANG_S
    while core.scheduler.connector.has_pending_push_work():
        if time.monotonic() > deadline:
            raise SystemExit("the engine does not come to rest")
        core.step_fn()


def measure(llm: Any, pairs: int, tokens: int) -> list[dict[str, float]]:
    """CPU-seconds of a new prompt each, with blending and without."""
    from vllm import SamplingParams

    from hotspan.bench.prose import prose

    core = llm.llm_engine.engine_core.engine_core
    manager = core.scheduler.connector.manager
    blending, encode = manager.blending, llm.get_tokenizer().encode
    sampling = SamplingParams(max_tokens=_OUTPUT_TOKENS, temperature=0, ignore_eos=True)

    def ask(seed: int, *, is_on: bool) -> float:
        prompt = encode(prose(seed, tokens))[:tokens]
        manager.blending = blending if is_on else None
        before = time.process_time()
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        settle(core)
        return time.process_time() - before

    rows: list[dict[str, float]] = []
    ask(1, is_on=True)  # its self-test is reported with the first step
    if blending.pace is None:
        raise SystemExit(f"blending is off: {blending.off}")
    for number in range(-2, pairs):  # the first two warm it up
        ways = (True, False) if number % 2 else (False, True)
        row = {"on" if is_on else "off": ask(2 * number + 5000 + is_on, is_on=is_on) for is_on in ways}
        if number >= 0:
            rows.append(row)
            print(number, {way: f"{seconds:.3f} s" for way, seconds in row.items()}, flush=True)
    manager.blending = blending
    if blending.off is not None or manager.cache.stats.blends or not len(blending.index):
        raise SystemExit(f"blending was off, or something matched: {blending.off} {manager.cache.stats.blends}")
    return rows


def main() -> None:
    options = arguments(__doc__, pairs=16, tokens=2048)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM

    from hotspan.bench.machine import write_results
    from hotspan.config.connector import transfer_config
    from hotspan.config.settings import CacheOptions
    from hotspan.demo.model import make_demo_model
    from hotspan.demo.plan import EngineSettings, usable_threads

    engine = EngineSettings(max_model_len=options.tokens + 256, threads=usable_threads())
    os.environ |= engine.environment()
    with tempfile.TemporaryDirectory(prefix="hotspan-blend-overhead-") as work:
        llm = LLM(
            str(make_demo_model(Path(work) / "model", "demo").path),
            dtype=engine.dtype,
            block_size=engine.block_size,
            max_model_len=engine.max_model_len,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            num_gpu_blocks_override=4 * (options.tokens // engine.block_size + 2),
            enforce_eager=True,
            kv_transfer_config=transfer_config(CacheOptions(ram_gib=1.0, blend="first_k").settings()),
            prefix_caching_hash_algo="sha256_cbor",
        )
        rows = measure(llm, options.pairs, options.tokens)
        llm.llm_engine.engine_core.shutdown()
    ratio = paired_ratio([row["on"] for row in rows], [row["off"] for row in rows])
    summary = {
        "CPU with blending / without, nothing matches": {
            **ratio.quartiles(),
            "sums": round(sum(row["on"] for row in rows) / sum(row["off"] for row in rows), 4),
        }
    }
    print(summary)
    if options.output:
        command = f"python -m benchmarks.blend_overhead --pairs {options.pairs} --tokens {options.tokens}"
        write_results(options.output, "blend-overhead", command=command, summary=summary, rows=rows)


if __name__ == "__main__":
    main()
