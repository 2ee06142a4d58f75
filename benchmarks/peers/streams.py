"""The requests that LMCache's own `lmcache bench engine` sends, and those of hotspan's bench: equal or not.

usage: python -m benchmarks.peers.streams [--output benchmarks/results/streams.json]

Needs LMCache 0.5.6, whose workloads run here against a server that answers at once, in simulated time; `make streams`
has it in an environment of its own. A stream is every request of warm-up and measurement in its order: its id, its
messages and its length of answer. Some are made with a model's tokenizer, of which there are three (material.py). Of
rag-qa-quality, the file with each answer's score is compared, too. A test compares hotspan's with the digests in the
results, without LMCache.
"""

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from unittest import mock

from benchmarks.harness import arguments
from benchmarks.peers.material import DATASET, material
from hotspan.bench.config import BenchConfig
from hotspan.bench.machine import write_results
from hotspan.bench.quality import quality_of
from hotspan.bench.records import BenchResult, RequestRecord, RoundName, RoundResult
from hotspan.bench.summary import summarize
from hotspan.bench.tokenizer import ModelTokenizer
from hotspan.bench.workloads.base import Prompt, Round

TOKENS_PER_GB: Final = 3000
TTFT_S: Final = 0.25
ANSWERS: Final = (
    "<final_answer> Old miller! </final_answer>",
    "<final_answer>no</final_answer> Wait. <FINAL_ANSWER>Yes.</FINAL_ANSWER>",
    "<final_answer>in a bridge</final_answer>, or <final_answer>over",
    "so it is",
    "<final_answer>The road, slowly</final_answer>",
    "<final_answer></final_answer>",
)
"""To questions about a dataset: complete, corrected, cut off, without tags, partly right, and empty."""


class Case(NamedTuple):
    """flags: under LMCache's names without their prefix. volume: in GB. tokenizer: one of material.TOKENIZERS."""

    workload: str
    flags: dict[str, Any]
    volume: float
    seed: int
    tokenizer: str = ""


_WITHOUT_TOKENIZER: Final = (
    ("long-doc-qa", {}, 20.0, 42),
    ("long-doc-qa", {"document_length": 300, "query_per_document": 5, "max_output_length": 9}, 1.0, 7),
    ("long-doc-qa", {"document_length": 300, "shuffle_policy": "tile"}, 1.0, 42),
    ("multi-round-chat", {}, 20.0, 42),
    ("multi-round-chat", {"chat_history_length": 90, "shared_prompt_length": 20, "qps": 7.0, "duration": 9.0}, 0.2, 1),
    ("random-prefill", {}, 100.0, 42),
    ("random-prefill", {"request_length": 5, "num_requests": 3}, 100.0, 42),
    ("prefix-suffix-tuner", {}, 100.0, 42),
    ("prefix-suffix-tuner", {"context_length": 700, "prefix_ratio": 0.5, "thrash": 2.0}, 100.0, 7),
)
_SMALL: Final = {"context_length": 50, "system_prompt_length": 0}
_OF_DATASET: Final = {"dataset": DATASET, "num_samples": 50, "max_output_length": 1024, "doc_align_tokens": 256}
_WITH_TOKENIZER: Final = (
    ("prefix-suffix-tuner", {}, 100.0, 42, "byte-level"),
    ("prefix-suffix-tuner", {"context_length": 700, "prefix_ratio": 0.5, "thrash": 2.0}, 100.0, 7, "sentencepiece"),
    ("long-doc-permutator", {}, 100.0, 42, "byte-level"),
    ("long-doc-permutator", {"num_inflight_requests": 3, "max_output_length": 1}, 100.0, 7, "sentencepiece"),
    ("long-doc-permutator", _SMALL | {"num_contexts": 3, "num_permutations": 4}, 100.0, 42, "byte-level"),
    ("long-doc-permutator", _SMALL | {"num_contexts": 2, "num_permutations": 10}, 100.0, 42, "byte-level"),
    ("long-doc-permutator", _SMALL | {"num_contexts": 9, "num_permutations": 30}, 100.0, 1, "byte-level"),
    ("rag-qa-quality", _OF_DATASET, 100.0, 42, "byte-level"),
    ("rag-qa-quality", _OF_DATASET | {"num_samples": 4, "doc_align_tokens": 100}, 100.0, 7, "sentencepiece"),
    (
        "rag-qa-quality",
        _OF_DATASET
        | {"max_output_length": 90, "doc_align_tokens": 16, "template_kwargs": {"thinking": "False", "effort": "-3"}},
        *(100.0, 42, "no-template"),
    ),
)
CASES: Final = tuple(Case(*each) for each in (*_WITHOUT_TOKENIZER, *_WITH_TOKENIZER))

_PREFIXES: Final = {
    "long-doc-qa": "ldqa",
    "multi-round-chat": "mrc",
    "random-prefill": "rp",
    "prefix-suffix-tuner": "psf",
    "long-doc-permutator": "ldp",
    "rag-qa-quality": "rag",
}

Stream = list[tuple[str, list[dict[str, str]], int]]


class Played(NamedTuple):
    """What was sent, and the file of answers and scores of rag-qa-quality but for its own path."""

    stream: Stream
    quality: dict[str, Any] | None = None


def digest(value: Any) -> str:
    return sha256(json.dumps(value).encode()).hexdigest()[:16]


def answer_to(request_id: str) -> str:
    is_sample = request_id.startswith("sample")
    return ANSWERS[int(request_id.removeprefix("sample")) % len(ANSWERS)] if is_sample else "yes"


class _Time:
    """A clock that nothing but sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._pause = asyncio.sleep

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(8):  # until whatever was sent has its answer
            await self._pause(0)


def ours(case: Case) -> Played:
    """What hotspan's bench sends, without its pre-warm-up. Within `material()` if it has a tokenizer."""
    config = _config(case)
    time, stream = _Time(), Stream()
    records: list[RequestRecord] = []  # of the round that was played last

    async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        stream.append((prompt.request_id, messages, prompt.max_tokens))
        answer, first = answer_to(prompt.request_id), time.now + TTFT_S
        record = RequestRecord(prompt.request_id, 0, True, time.now, first, first, answer=answer, num_output_tokens=3)
        records.append(prompt.scored(record))
        return record

    async def play() -> None:
        for each in await _rounds(config, case):
            if each.name in (RoundName.WARM_UP, RoundName.QUERY):
                records.clear()
                await each.play(send, lambda: time.now)

    with mock.patch("asyncio.sleep", time.sleep):
        asyncio.run(play())
    if case.workload != "rag-qa-quality":
        return Played(stream)
    query = RoundResult(RoundName.QUERY, summarize(records, 1.0, None, None), tuple(records))
    return Played(stream, _without_path(quality_of(BenchResult(config.to_flat(), (query,)), Path("any"))))


def _config(case: Case) -> BenchConfig:
    flat = {f"{_PREFIXES[case.workload]}_{name}": value for name, value in case.flags.items()}
    more = {"kv_cache_volume": case.volume, "tokens_per_gb_kvcache": TOKENS_PER_GB, "seed": case.seed}
    return BenchConfig.from_flat({"workload": case.workload, "model": case.tokenizer, **more, **flat})


async def _rounds(config: BenchConfig, case: Case) -> Sequence[Round]:
    tokenizer = ModelTokenizer.load(Path(case.tokenizer)) if case.tokenizer else None

    async def no_tokenizer(text: str) -> int | None:
        return None

    if tokenizer is None:
        return await config.options.rounds(config.scale, case.seed, no_tokenizer)
    return config.options.token_rounds(config.scale, case.seed, tokenizer)


def _without_path(quality: dict[str, Any]) -> dict[str, Any]:
    """Without where it was written."""
    return {**quality, "config": {name: value for name, value in quality["config"].items() if name != "output_path"}}


class _Sender:
    """Stands where LMCache has its client: answers at once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.finished: Callable[..., None] = lambda result, text: None

    async def send_request(self, request_id: str, messages: Sequence[dict[str, str]], max_tokens: int = 128) -> Any:
        self._stream.append((request_id, [dict(each) for each in messages], max_tokens))
        result = SimpleNamespace(request_id=request_id, successful=True, error="", ttft=TTFT_S, num_output_tokens=3)
        self.finished(result, answer_to(request_id))
        return result

    async def send_warmup_request(self, request_id: str, messages: Sequence[dict[str, str]]) -> Any:
        return await self.send_request(request_id, messages, 1)

    async def close(self) -> None: ...


def reference(case: Case) -> Played:
    """What LMCache's bench sends, without the request that only wakes the engine. Within `material()`."""
    package = "lmcache.cli.commands.bench.engine_bench.workloads"
    module = importlib.import_module(f"{package}.{case.workload.replace('-', '_')}")
    name = {"long-doc-qa": "LongDocQA"}.get(case.workload, case.workload.title().replace("-", ""))
    kind, settings = getattr(module, f"{name}Workload"), getattr(module, f"{name}Config")
    time, stream = _Time(), Stream()
    sender = _Sender(stream)
    more = {"model_name": case.tokenizer} if case.tokenizer else {}
    resolved = settings.resolve(**_sizes(case), **_flags(case, module))
    played = kind(resolved, sender, mock.MagicMock(), mock.MagicMock(), seed=case.seed, **more)
    sender.finished = played.request_finished
    with mock.patch("asyncio.sleep", time.sleep), mock.patch("time.monotonic", lambda: time.now):
        played.run()
    sent = [each for each in stream if each[0] != "engine_warmup"]
    if case.workload != "rag-qa-quality":
        return Played(sent)
    return Played(sent, _without_path(json.loads(Path(resolved.output_path).read_text())))


def _sizes(case: Case) -> dict[str, Any]:
    """How much KV there is, for the workloads that ask."""
    if case.workload in ("random-prefill", "long-doc-permutator", "rag-qa-quality"):
        return {}
    volume = {} if case.workload == "prefix-suffix-tuner" else {"kv_cache_volume_gb": case.volume}
    return {"tokens_per_gb_kvcache": TOKENS_PER_GB, **volume}


def _flags(case: Case, module: Any) -> dict[str, Any]:
    """The flags as LMCache's command gives them to the workload."""
    if case.workload != "rag-qa-quality":
        return case.flags
    written = [f"{name}={value}" for name, value in case.flags.get("template_kwargs", {}).items()]
    parsed = module.parse_template_kwargs(written)
    return {**case.flags, "template_kwargs": parsed, "output_path": "quality.json"}


def main() -> int:
    options = arguments(__doc__)
    rows = []
    for case in CASES:
        with material():
            theirs, found = reference(case), ours(case)
        row = {"workload": case.workload, "flags": case.flags, "kv_cache_volume": case.volume, "seed": case.seed}
        row |= {"tokenizer": case.tokenizer, "requests": len(theirs.stream)}
        row |= {"reference": digest(theirs.stream), "hotspan": digest(found.stream)}
        if theirs.quality is not None:
            row |= {"reference_quality": digest(theirs.quality), "hotspan_quality": digest(found.quality)}
        rows.append(row | {"equal": theirs == found})
        print(json.dumps(rows[-1]), flush=True)
    if options.output is not None:
        write_results(
            *(options.output, "streams", "python -m benchmarks.peers.streams"),
            reference="LMCache 0.5.6, lmcache bench engine",
            streams=rows,
        )
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
