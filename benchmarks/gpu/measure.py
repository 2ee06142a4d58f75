"""Step 3, on the machine with the GPU: measure one part with one model, within ten minutes, into one JSON file.

usage: python -m benchmarks.gpu.measure --part PART --model MODEL --output DIR [--repetition N] [--commit COMMIT]

    identity     digests of KV at store and at load, and tokens: RAM, disk, a new engine, against the engine's own hit
    transfers    GPU to RAM and back in GB/s, against a plain pinned copy
    long-doc-qa  46 x 10,000 tokens, 4 at a time: no cache, RAM, disk with O_DIRECT, vLLM's native offloading
    chat         conversations: RAM for a fraction of them, against that and a daemon that holds all
    startup      seconds until ready, and memory, by mode

`--cpu` runs every part's code with a tiny model on a machine without a GPU; its figures say nothing about a GPU.
The file is written anew after every step; what there was no time or no room for stands in it under "not_measured".
Exit status 0 only if all of the part was measured, every request was answered, and identity held.
"""

import argparse
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

from benchmarks.gpu.models import SHAPES, cut_to, make_model
from benchmarks.gpu.record import Deadline, OutOfTime, Result, command_line, gpu_facts, gpu_memory_mib, head, say
from benchmarks.gpu.servers import Setting, failed_requests
from hotspan.core.errors import HotspanError

PARTS: Final = ("identity", "transfers", "long-doc-qa", "chat", "startup")
MODELS: Final = tuple(name for name in SHAPES if name != "tiny")
POOL_TOKENS: Final = 10 * 12_800
"""The most tokens that any part's pool on the GPU holds: a model to be cut leaves room for them."""


def main() -> int:
    options = _options()
    if not options.cpu and gpu_facts() is None:
        print(
            "measure: nvidia-smi shows no GPU: run it on a machine with one, or try the code with --cpu",
            file=sys.stderr,
        )
        return 2
    name = "tiny" if options.cpu else options.model
    result = Result(options.output / f"{options.part}-{name}-{options.repetition}.json", {})
    deadline = Deadline(options.limit_s)
    with tempfile.TemporaryDirectory(prefix="hotspan-gpu-", dir=options.work) as scratch, deadline.held():
        try:
            _measure(options, name, Path(scratch), deadline, result)
            result.close("incomplete" if result.not_measured else "complete")
        except (OutOfTime, HotspanError) as error:
            result.leave_out("the rest", str(error))
            result.close("cut short")
        except BaseException:
            result.close("failed")
            raise
    say(f"{result.path}: {result.state}")
    held = result.measured.get("identity", {}).get("passed", True)
    excused = {"native"} if options.cpu else set()
    failed = failed_requests(result.measured)
    if failed:
        say(f"{failed} requests failed")
    return 0 if held and not failed and set(result.not_measured) <= excused else 1


def _measure(options: argparse.Namespace, name: str, scratch: Path, deadline: Deadline, result: Result) -> None:
    memory = gpu_memory_mib()
    shape = SHAPES[name] if memory is None else cut_to(name, int(memory[1]) << 20, POOL_TOKENS)
    described = {"name": name, "kv_bytes_per_token": shape.kv_bytes_per_token, "weight_bytes": shape.weight_bytes}
    described |= {field.name: getattr(shape, field.name) for field in fields(shape) if field.name != "rope"}
    result.head = head(options.part, described, options.commit, command_line())
    result.head |= {"engine": {"is_cpu": options.cpu, "has_graphs": options.graphs}, "limit_s": options.limit_s}
    say(f"{options.part}: {name}, {shape.layers} layers, {shape.weight_bytes / 1e9:.1f} GB of weights")
    model = make_model(scratch / "model", shape)
    setting = Setting(
        model=model,
        shape=shape,
        is_cpu=options.cpu,
        has_graphs=options.graphs,
        work=scratch,
        deadline=deadline,
        repetition=options.repetition,
    )
    os.environ.update(setting.environment())
    _part(options, setting, result)


def _part(options: argparse.Namespace, setting: Setting, result: Result) -> None:
    if options.part in ("identity", "transfers"):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        from benchmarks.gpu import inside

        {"identity": inside.identity, "transfers": inside.transfers}[options.part](setting, result)
        return
    from benchmarks.gpu import workloads

    if options.part == "long-doc-qa":
        workloads.long_doc_qa(setting, result, options.documents)
    else:
        {"chat": workloads.chat, "startup": workloads.startup}[options.part](setting, result)


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--model", choices=MODELS, default="qwen2.5-7b")
    parser.add_argument("--output", type=Path, required=True, help="directory of the result files")
    parser.add_argument("--repetition", type=int, default=1, help="1, 2, ...: which mode comes first; names the file")
    parser.add_argument("--commit", default="", help="of this tree, where it is no git checkout")
    parser.add_argument("--documents", type=int, help="of long-doc-qa, instead of 46")
    parser.add_argument(
        "--graphs", action="store_true", help="CUDA graphs and compilation: a minute more at each start"
    )
    parser.add_argument("--limit-s", type=float, default=570.0, help="the part ends by itself within so many seconds")
    parser.add_argument(
        "--work", type=Path, help="a directory on the disk to measure, with room; else the temporary one"
    )
    parser.add_argument("--cpu", action="store_true", help="a tiny model, to try the code")
    options = parser.parse_args()
    if options.repetition < 1 or options.limit_s < 60:
        parser.error("--repetition must be at least 1 and --limit-s at least 60")
    return options


if __name__ == "__main__":
    sys.exit(main())
