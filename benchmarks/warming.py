"""Time to first token of the first question about warmed documents, against a later question and unwarmed documents.

usage: python -m benchmarks.warming [--documents 8] [--output FILE]

One server over a Llama shape with random weights in float32. `hotspan cache warm` computes half of the documents. Then
each document is asked twice, in two rounds; the engine's own prefix cache has room for two of them, so that hits come
from RAM.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.bench.prose import prose
from hotspan.demo.model import make_demo_model
from kit.families.make import make_family
from kit.families.table import SIZES, Family
from tests.server.conftest import Server, serving

SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
WORDS = 1200
TEMPLATE = "Read this.\n{document}\nQuestion: {question}\nAnswer:"


def ttft(server: Server, document: str, question: str) -> float:
    """Seconds to the first token of an answer."""
    prompt = TEMPLATE.replace("{document}", document).replace("{question}", question)
    body = {"model": server.model, "prompt": prompt, "max_tokens": 2, "stream": True, "temperature": 0}
    began_s = time.perf_counter()
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=600) as answer:
        answer.raise_for_status()
        next(line for line in answer.iter_lines() if line.startswith("data: {"))
        return time.perf_counter() - began_s


def warmed(server: Server, directory: Path, template: Path) -> float:
    """Seconds that `hotspan cache warm` takes."""
    command = [sys.executable, "-m", "hotspan", "cache", "warm", str(directory), "--server", server.url]
    began_s = time.perf_counter()
    subprocess.run([*command, "--template", str(template)], check=True)
    return time.perf_counter() - began_s


def main() -> int:
    options = arguments(__doc__, documents=8)
    documents = [prose(number, WORDS) for number in range(2 * options.documents)]
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        tiny = make_demo_model(scratch / "tiny", "tiny").path
        model = make_family(Family(name="Llama", config="LlamaConfig", fields={**SIZES, **SHAPE}), scratch / "m", tiny)
        (scratch / "docs").mkdir()
        for number, document in enumerate(documents[: options.documents]):
            (scratch / "docs" / f"{number}.txt").write_text(document)
        (scratch / "template").write_text(TEMPLATE)
        with serving(model, scratch / "log", "--ram-gib", "2") as server:
            warm_s = [warmed(server, scratch / "docs", scratch / "template") for _ in range(2)]
            rounds = [
                [ttft(server, document, question) for document in documents] for question in ("what is new?", "who?")
            ]
    first, later = (taken[: options.documents] for taken in rounds)
    figures: dict[str, Any] = {
        "ttft_first_question_s": statistics.median(first),
        "ttft_later_question_s": statistics.median(later),
        "ttft_unwarmed_s": statistics.median(rounds[0][options.documents :]),
        "first_to_later": statistics.median(a / b for a, b in zip(first, later, strict=True)),
        "warming_s": warm_s[0],
        "warming_again_s": warm_s[1],
    }
    figures["unwarmed_to_first"] = figures["ttft_unwarmed_s"] / figures["ttft_first_question_s"]
    print(figures)
    if options.output is not None:
        command = f"python -m benchmarks.warming --documents {options.documents}"
        settings = {"documents": options.documents, "words": WORDS}
        write_results(options.output, "warming", command=command, settings=settings, figures=figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
