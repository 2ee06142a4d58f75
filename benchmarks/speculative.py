"""What speculative decoding saves: time between tokens and CPU, with the share of drafted tokens that are accepted.

usage: python -m benchmarks.speculative [--target wide|small] [--modes ngram eagle eagle3] [--texts 6] [--output FILE]

Up to four servers run at once: without speculation ("none"), and with drafts of three tokens by n-gram, by a trained
EAGLE head and by a trained EAGLE-3 head. Each text goes to all servers, in turns, then all texts again, which the
engines' small pools have lost by then, so that their KV, the heads' included, is loaded from RAM. One request runs at
a time; a server's CPU-seconds are read before and after it, once the server has come to rest. Ratios are between
requests of one text; their median and quartiles are reported. Every server must give the same tokens each time. Counts
of drafts are vLLM's (`metrics.speculative_decoding`). At the end each server gets all texts at once, for its
throughput.

`small` is the trained model of benchmarks/assets/speculative. Its 0.3 million parameters are a small part of a step:
most is vLLM's own code, which a drafting step runs as well. `wide` is the same model with MLPs of WIDTH columns, of
which all but the trained ones are zero: the same function, hence the same tokens and the same heads, at the cost of a
model of 50 million parameters, which are read from memory in every step.
"""

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch.nn import functional

from benchmarks.harness import arguments
from benchmarks.speculators import ASSETS, DRAFTED, rota
from hotspan.bench.counters import ProcessTreeCpu, settled_seconds
from hotspan.bench.machine import write_results
from hotspan.core.addresses import free_port
from hotspan.core.aftermath import Aftermath
from hotspan.demo.server import ServerProcess, serve_command
from kit.measure import paired_ratio

HEADS = ("eagle", "eagle3")
FIGURES = ("itl_s", "cpu_s", "ttft_s")
PROMPT_DAYS, ANSWER_TOKENS = 8, 48
WIDTH = 65_536
ENGINE = (
    *("--dtype", "float32", "--block-size", "32", "--chunk-tokens", "64", "--max-model-len", "1024", "--enforce-eager"),
    *("--num-gpu-blocks-override", "48", "--gpu-memory-utilization", "0.05", "--ram-gib", "0.25"),
    *("--served-model-name", "target", "--disable-uvicorn-access-log"),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}

Asked = dict[str, Any]


def speculation(mode: str) -> tuple[str, ...]:
    """The options of a mode."""
    if mode == "none":
        return ()
    config: dict[str, Any] = {"method": mode, "num_speculative_tokens": DRAFTED}
    config |= {"model": str(ASSETS / mode)} if mode in HEADS else {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    return ("--speculative-config", json.dumps(config))


def widened(directory: Path) -> Path:
    """The small model with MLPs of WIDTH columns, the further ones zero. Writes 100 MB into `directory`."""
    shutil.copytree(ASSETS / "target", directory)
    weights = load_file(directory / "model.safetensors")
    for name, weight in weights.items():
        if ".mlp." in name:
            rows, columns = weight.shape
            more = (0, WIDTH - columns) if "down_proj" in name else (0, 0, 0, WIDTH - rows)
            weights[name] = functional.pad(weight, more)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"intermediate_size": WIDTH}))
    return directory


def stream(server: ServerProcess, prompt: str) -> Asked:
    """One streamed answer: its tokens, TTFT, mean time per token after the first, cached tokens and drafts."""
    body = {
        "model": "target",
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    tokens: list[int] = []
    began, first, last = time.perf_counter(), 0.0, 0.0
    usage: Asked = {}
    metrics: Asked = {}
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event["choices"]:
                if choice.get("token_ids"):
                    last = time.perf_counter()
                    first = first or last
                    tokens += choice["token_ids"]
            usage, metrics = event.get("usage") or usage, event.get("metrics") or metrics
    if len(tokens) != ANSWER_TOKENS:
        raise SystemExit(f"a request gave {len(tokens)} tokens")
    return {
        "tokens": tokens,
        "ttft_s": first - began,
        "itl_s": (last - first) / (ANSWER_TOKENS - 1),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        "drafts": metrics.get("speculative_decoding"),
    }


def ask(server: ServerProcess, prompt: str) -> Asked:
    """`stream`, with the server's CPU-seconds."""
    cpu = ProcessTreeCpu(server.pid)
    before = asyncio.run(settled_seconds(cpu.seconds))
    answer = stream(server, prompt)
    after = asyncio.run(settled_seconds(cpu.seconds))
    if before is None or after is None:
        raise SystemExit("a server has ended")
    return answer | {"cpu_s": after - before}


def throughput(servers: dict[str, ServerProcess], rows: list[dict[str, Asked]]) -> dict[str, Any]:
    """Output tokens per second and equal answers of each server when it gets all texts at once, median of three."""
    found: dict[str, list[float]] = {mode: [] for mode in servers}
    equal = dict.fromkeys(servers, 0)
    for _ in range(3):
        for mode, server in servers.items():
            began = time.perf_counter()
            with ThreadPoolExecutor(len(rows)) as pool:
                answers = list(pool.map(lambda seed, to=server: stream(to, rota(seed, PROMPT_DAYS)), range(len(rows))))
            found[mode].append(len(rows) * ANSWER_TOKENS / (time.perf_counter() - began))
            equal[mode] += sum(a["tokens"] == row["none"]["tokens"] for a, row in zip(answers, rows, strict=True))
    return {
        mode: {
            "output_tokens_per_s": round(statistics.median(rates), 1),
            "/ none": round(statistics.median(a / b for a, b in zip(rates, found["none"], strict=True)), 3),
            "answers equal to one at a time": f"{equal[mode]} of {3 * len(rows)}",
        }
        for mode, rates in found.items()
    }


def summarize(rounds: dict[str, list[dict[str, Asked]]]) -> dict[str, Any]:
    """Medians and quartiles of the ratios to the server without speculation, and the drafts, by mode and round."""
    none = {
        name: {
            figure: statistics.median(row["none"][figure] for row in rows) for figure in ("itl_s", "cpu_s", "ttft_s")
        }
        for name, rows in rounds.items()
    }
    found: dict[str, Any] = {f"none, {name}": figures for name, figures in none.items()}
    for mode in sorted(rounds["computed"][0].keys() - {"none"}):
        for name, rows in rounds.items():
            drafts = [row[mode]["drafts"] for row in rows]
            accepted, drafted = (sum(d[f"num_{what}draft_tokens"] for d in drafts) for what in ("accepted_", ""))
            steps = sum(d["num_spec_steps"] for d in drafts)
            figures: dict[str, Any] = {
                "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
                "mean_accepted_length": round(1 + accepted / steps, 3) if steps else None,
                "cached_share": round(sum(row[mode]["cached_tokens"] > 0 for row in rows) / len(rows), 3),
            }
            for figure in FIGURES:
                ours, theirs = ([row[way][figure] for row in rows] for way in (mode, "none"))
                ratio = paired_ratio(ours, theirs)
                figures[f"{figure} / none"] = [round(n, 3) for n in (ratio.quartile_1, ratio.median, ratio.quartile_3)]
            found[f"{mode}, {name}"] = figures
    return found


def measure(servers: dict[str, ServerProcess], texts: int) -> dict[str, list[dict[str, Asked]]]:
    """Each text to each server, then all again. Raises: SystemExit if any two answers to a text differ."""
    prompts, modes = [rota(seed, PROMPT_DAYS) for seed in range(texts)], list(servers)
    for server in servers.values():
        ask(server, rota(-1, PROMPT_DAYS))
    rounds: dict[str, list[dict[str, Asked]]] = {"computed": [], "from RAM": []}
    for name, rows in rounds.items():
        for n, prompt in enumerate(prompts):
            turn = n % len(modes)
            rows.append({mode: ask(servers[mode], prompt) for mode in modes[turn:] + modes[:turn]})
            same = {tuple(answer["tokens"]) for row in (rows[n], rounds["computed"][n]) for answer in row.values()}
            if len(same) != 1:
                raise SystemExit(f"text {n}, {name}: the servers gave different tokens")
            print(f"{name} {n}", {mode: f"{1e3 * rows[n][mode]['itl_s']:.2f} ms" for mode in modes}, flush=True)
    return rounds


def main() -> None:
    options = arguments(__doc__, target=("wide", "small"), modes=["ngram", *HEADS], texts=6)
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspan-speculative-")))
        aftermath = stack.enter_context(Aftermath())
        target = widened(work / "target") if options.target == "wide" else ASSETS / "target"
        servers: dict[str, ServerProcess] = {}
        for mode in ("none", *options.modes):
            port = free_port()
            command = serve_command(target, (*ENGINE, "--port", str(port), *speculation(mode)))
            servers[mode] = ServerProcess(command, ENVIRONMENT, port, work / f"{mode}.log", aftermath)
            stack.enter_context(servers[mode])
        for server in servers.values():
            server.wait_until_ready(300, lambda waited, line: None)
        rounds = measure(servers, options.texts)
        summary = summarize(rounds) | {"all at once": throughput(servers, rounds["computed"])}
    for title, figures in summary.items():
        print(title, json.dumps(figures))
    if options.output:
        for row in (row for rows in rounds.values() for row in rows):
            for answer in row.values():
                del answer["tokens"]
        command = " ".join(["python -m benchmarks.speculative", *sys.argv[1:]])
        write_results(
            options.output, "speculative", command=command, target=options.target, summary=summary, rounds=rounds
        )


if __name__ == "__main__":
    main()
