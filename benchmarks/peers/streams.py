"""The requests that LMCache's own `lmcache bench engine` sends, and those of hotspan's bench: equal or not.

usage: python -m benchmarks.peers.streams [--output benchmarks/results/streams.json]

Needs LMCache 0.5.6, whose workloads run here against a server that answers at once, in simulated time; `make streams`
has it in an environment of its own. A stream is every request of warm-up and measurement in its order: its id, its
messages and its length of answer. A test compares hotspan's with the digests in the results, without LMCache.
"""

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

from benchmarks.harness import arguments
from hotspan.bench.config import BenchConfig
from hotspan.bench.machine import write_results
from hotspan.bench.records import RequestRecord, RoundName
from hotspan.bench.workloads.base import Prompt

TOKENS_PER_GB: Final = 3000
ANSWER: Final = "yes"

# Workload, flags under LMCache's names without their prefix, volume in GB, seed.
CASES: Final[tuple[tuple[str, dict[str, Any], float, int], ...]] = (
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

_PREFIXES: Final = {
    "long-doc-qa": "ldqa",
    "multi-round-chat": "mrc",
    "random-prefill": "rp",
    "prefix-suffix-tuner": "psf",
}

Stream = list[tuple[str, list[dict[str, str]], int]]


def digest(stream: Stream) -> str:
    return sha256(json.dumps(stream).encode()).hexdigest()[:16]


class _Time:
    """A clock that nothing but sleeping moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self._pause = asyncio.sleep

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for _ in range(8):  # until whatever was sent has its answer
            await self._pause(0)


def ours(workload: str, flags: dict[str, Any], volume: float, seed: int) -> Stream:
    """What hotspan's bench sends, without a tokenizer and without its pre-warm-up."""
    flat = {f"{_PREFIXES[workload]}_{name}": value for name, value in flags.items()}
    more = {"kv_cache_volume": volume, "tokens_per_gb_kvcache": TOKENS_PER_GB, "seed": seed}
    config = BenchConfig.from_flat({"workload": workload, **more, **flat})
    time, stream = _Time(), Stream()

    async def no_tokenizer(text: str) -> int | None:
        return None

    async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
        messages = [{"role": each.role, "content": each.content} for each in prompt.messages]
        stream.append((prompt.request_id, messages, prompt.max_tokens))
        return RequestRecord(prompt.request_id, 0, True, time.now, time.now, time.now, answer=ANSWER)

    async def play() -> None:
        for each in await config.options.rounds(config.scale, seed, no_tokenizer):
            if each.name in (RoundName.WARM_UP, RoundName.QUERY):
                await each.play(send, lambda: time.now)

    with mock.patch("asyncio.sleep", time.sleep):
        asyncio.run(play())
    return stream


class _Sender:
    """Stands where LMCache has its client: answers at once."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.finished: Callable[..., None] = lambda result, text: None

    async def send_request(self, request_id: str, messages: Sequence[dict[str, str]], max_tokens: int = 128) -> Any:
        self._stream.append((request_id, [dict(each) for each in messages], max_tokens))
        result = SimpleNamespace(request_id=request_id, successful=True, error="")
        self.finished(result, ANSWER)
        return result

    async def send_warmup_request(self, request_id: str, messages: Sequence[dict[str, str]]) -> Any:
        return await self.send_request(request_id, messages, 1)

    async def close(self) -> None: ...


def reference(workload: str, flags: dict[str, Any], volume: float, seed: int) -> Stream:
    """What LMCache's bench sends, without a tokenizer and without the request that only wakes the engine."""
    package = "lmcache.cli.commands.bench.engine_bench.workloads"
    module = importlib.import_module(f"{package}.{workload.replace('-', '_')}")
    name = {"long-doc-qa": "LongDocQA"}.get(workload, workload.title().replace("-", ""))
    kind, settings = getattr(module, f"{name}Workload"), getattr(module, f"{name}Config")
    sizes: dict[str, Any] = {"tokens_per_gb_kvcache": TOKENS_PER_GB, "kv_cache_volume_gb": volume}
    sizes = {
        "random-prefill": {},
        "prefix-suffix-tuner": {"tokens_per_gb_kvcache": TOKENS_PER_GB},
    }.get(workload, sizes)
    time, stream = _Time(), Stream()
    sender = _Sender(stream)
    played = kind(settings.resolve(**sizes, **flags), sender, mock.MagicMock(), mock.MagicMock(), seed=seed)
    sender.finished = played.request_finished
    with mock.patch("asyncio.sleep", time.sleep), mock.patch("time.monotonic", lambda: time.now):
        played.run()
    return [each for each in stream if each[0] != "engine_warmup"]


def main() -> int:
    options = arguments(__doc__)
    rows = []
    for workload, flags, volume, seed in CASES:
        theirs, found = reference(workload, flags, volume, seed), ours(workload, flags, volume, seed)
        row = {"workload": workload, "flags": flags, "kv_cache_volume": volume, "seed": seed, "requests": len(theirs)}
        rows.append(row | {"reference": digest(theirs), "hotspan": digest(found), "equal": theirs == found})
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
