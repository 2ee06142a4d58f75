"""How much of permuted documents is reused: a workload on hotspan's server, with blending and without.

usage: python -m benchmarks.blend_permutator [--workload long-doc-permutator] [--size tiny] [--requests 4]
       [--tokens 5000] [--modes M...] [--output FILE]

long-doc-permutator: five contexts of --tokens tokens stand in another order in each prompt, behind 1,000 tokens of
system prompt. rag-qa-quality: five documents in another order before each question, without a system prompt.

A mode may name the share that is computed again: deviation=0.05. `off` has hotspan's and the engine's prefix caches,
`full` has none. Each has a server of its own, one after the other, over the same model with random weights: the figures
are of reuse and of speed, none is of quality. Reuse is the share
of the timed prompts' tokens that are taken from windows, and beside it the share that the prefix caches have; of what
is taken from windows, a share is computed again.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.bench.workloads.long_doc_permutator import SEPARATOR
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.demo.model import make_demo_model
from hotspan.demo.plan import EngineSettings, usable_threads
from hotspan.demo.server import ServerProcess, serve_command

CONTEXTS, SYSTEM_TOKENS, OUTPUT_TOKENS, READY_S = 5, 1000, 8, 300.0
PERMUTATOR = "long-doc-permutator"


def blend_counters(url: str) -> dict[str, float]:
    """hotspan_blend_requests_total and hotspan_blend_tokens_total, by label."""
    with urllib.request.urlopen(url + "/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    counts: dict[str, float] = {}
    for line in lines:
        if line.startswith(("hotspan_blend_requests_total{", "hotspan_blend_tokens_total{")):
            name, value = line.split('what="')[1].split('"')[0], float(line.rsplit(" ", 1)[1])
            counts[name] = counts.get(name, 0.0) + value
    return counts


def sized(workload: str, requests: int, tokens: int) -> dict[str, int]:
    """The options of a workload."""
    if workload == PERMUTATOR:
        own = {"ldp-num-contexts": CONTEXTS, "ldp-context-length": tokens, "ldp-system-prompt-length": SYSTEM_TOKENS}
        return own | {"ldp-num-permutations": requests, "ldp-max-output-length": OUTPUT_TOKENS}
    own = {"rag-num-cases": 1, "rag-num-documents": CONTEXTS, "rag-document-length": tokens}
    return own | {"rag-num-questions": requests, "rag-max-output-length": OUTPUT_TOKENS}


def played(url: str, workload: str, sizes: dict[str, int], output: Path) -> dict[str, Any]:
    """The summary of the timed round."""
    command = [sys.executable, "-m", "hotspan", "bench", "engine", "--workload", workload]
    command += ["--engine-url", url, "--no-csv", "--quiet", "--output", str(output)]
    command += [word for name, size in sizes.items() for word in (f"--{name}", str(size))]
    subprocess.run([*command, "--json"], check=True, stdout=subprocess.DEVNULL)
    return dict(json.loads((output / "bench_summary.json").read_text())["results"])


def measure(workload: str, mode: str, model: Path, requests: int, tokens: int, work: Path) -> dict[str, Any]:
    port = free_port()
    longest = (CONTEXTS * tokens + SYSTEM_TOKENS) * 11 // 10 // 128 * 128 + 512
    engine = EngineSettings(max_model_len=longest, threads=usable_threads())
    name, _, share = mode.partition("=")
    words = ["--ram-gib", "2", "--blend", name, "--blend-check-every", "0", "--blend-separator", SEPARATOR]
    words += ["--blend-recompute-ratio", share] if share else []
    if mode == "full":
        words = ["--no-cache", "--no-enable-prefix-caching"]
    command = serve_command(model, (*engine.arguments(port, 4 * longest // 128), *words))
    with (
        Aftermath() as aftermath,
        ServerProcess(command, engine.environment(), port, work / f"{mode}.log", aftermath) as server,
    ):
        server.wait_until_ready(READY_S, lambda waited, line: None)
        results = played(server.url, workload, sized(workload, requests, tokens), work / mode)
        counts = blend_counters(server.url)
    if results["failed_requests"] or counts.get("blended", 0) > requests:
        raise SystemExit(f"{mode}: requests failed, or warm-ups were blended, too: {results} {counts}")
    total = results["total_input_tokens"]
    return {
        "requests": results["total_requests"],
        "blended": counts.get("blended", 0),
        "prompt tokens": total,
        "taken from windows": round(counts.get("reused", 0) / total, 4),
        "computed again": round(counts.get("recomputed", 0) / total, 4),
        "prefix caches": round((results["total_cached_tokens"] or 0) / total, 4),
        "TTFT p50, ms": round(results["p50_ttft_ms"], 1),
        "dtype": engine.dtype,
        "counters": counts,
    }


def main() -> None:
    options = arguments(__doc__, workload=PERMUTATOR, size="tiny", requests=4, tokens=5000, modes=["first_k", "off"])
    with tempfile.TemporaryDirectory(prefix="hotspan-blend-permutator-") as directory:
        work = Path(directory)
        model = make_demo_model(work / "model", options.size).path
        summary = {}
        for mode in options.modes:
            summary[mode] = measure(options.workload, mode, model, options.requests, options.tokens, work)
            print(mode, summary[mode], flush=True)
    if options.output:
        command = f"python -m benchmarks.blend_permutator --workload {options.workload} --size {options.size} "
        command += f"--requests {options.requests} --tokens {options.tokens} --modes {' '.join(options.modes)}"
        kind = "blend-permutator" if options.workload == PERMUTATOR else "blend-rag"
        write_results(options.output, kind, command=command, summary=summary)


if __name__ == "__main__":
    main()
