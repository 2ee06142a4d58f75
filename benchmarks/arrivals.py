"""How close to its due time a request of an open loop is sent, and reaches the server, at 50 requests per second.

usage: python -m benchmarks.arrivals [--requests 1000] [--rate 50] [--priority 0] [--output FILE]

A server in a process of its own answers in a stream and tells in each answer when it had the first byte of the
request. Both processes read the same monotonic clock. `sent` is the lateness that the bench reports, `arrived` has what
the client does after that and the kernel's part. The client shows its progress on a terminal, as `hotspan bench engine`
does. In turns with each load, a process that does nothing else sleeps until the same times: what it is late is the
machine's. With `--priority 10`, as root, all of them run before the machine's other
processes (SCHED_FIFO): on a machine that others use, only that tells what is the client's.

Goal: no request is sent more than 5 ms late, and 99 % arrive within that, at each of the loads.
"""

import asyncio
import contextlib
import io
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.harness import arguments
from benchmarks.router_overhead import running
from hotspan.bench.config import BenchConfig
from hotspan.bench.machine import write_results
from hotspan.bench.records import RoundName
from hotspan.bench.runner import run_rounds
from hotspan.bench.terminal import TerminalProgress
from hotspan.bench.workloads.base import WorkloadOptions
from hotspan.bench.workloads.prefix_repetition import PrefixRepetitionOptions
from hotspan.bench.workloads.sessions import due_times
from hotspan.bench.workloads.trace_replay import TraceReplayOptions
from hotspan.core.trace import BLOCK_TOKENS, Request, Trace, write
from kit.measure import quantile
from kit.ports import free_port

GOAL_MS: Final = 5.0


class Load(NamedTuple):
    """What a request makes the client write and read. from_trace: its text is made from a trace while others run."""

    prompt_tokens: int
    answer_tokens: int
    gap_s: float = 0.02
    from_trace: bool = False


LOADS: Final = {
    "short": Load(128, 1),
    "chat": Load(2_000, 64),
    "long prompts": Load(16_000, 32),
    "trace": Load(16_000, 32, from_trace=True),
}

_HEAD: Final = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Server(asyncio.Protocol):
    """Streams the time at which a request's first byte came, and then as many words as asked for."""

    def __init__(self, gap_s: float) -> None:
        self._gap_s = gap_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._got = bytearray()
        self._at = 0.0

    def data_received(self, data: bytes) -> None:
        if not self._got:
            self._at = time.monotonic()
        self._got += data
        head, found, _ = bytes(self._got[:4096]).partition(b"\r\n\r\n")
        lengths = [
            line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
        ]
        length = int(lengths[0]) if lengths else 0
        if not found or len(self._got) < len(head) + 4 + length:
            return
        body = bytes(self._got[len(head) + 4 :])
        self._got.clear()
        if head.startswith(b"POST /v1/chat/completions"):
            self._transport.write(_HEAD)
            self._send(0, json.loads(body)["max_tokens"])
            return
        answer = b'{"data": [{"id": "arrivals"}]}'
        status = b"200 OK" if head.startswith((b"GET /v1/models", b"GET /ping")) else b"404 Not Found"
        self._transport.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(answer), answer))

    def _send(self, number: int, tokens: int) -> None:
        if self._transport.is_closing():
            return
        if number < tokens:
            word = repr(self._at) if number == 0 else " word"
            self._event({"choices": [{"index": 0, "delta": {"content": word}, "finish_reason": None}]})
            asyncio.get_running_loop().call_later(self._gap_s, self._send, number + 1, tokens)
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        self._event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})
        self._transport.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        line = b"data: " + json.dumps(event).encode() + b"\n\n"
        self._transport.write(b"%x\r\n%b\r\n" % (len(line), line))


async def serve(port: int, gap_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Server(gap_s), "127.0.0.1", port)
    await server.serve_forever()


def late_s(load: Load, requests: int, rate: float, seed: int) -> dict[str, list[float]]:
    """Seconds from when each request was due until it was sent, and until the server had its first byte."""
    port = free_port()
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with contextlib.ExitStack() as stack:
        options = workload(load, requests, rate, seed, Path(stack.enter_context(tempfile.TemporaryDirectory())))
        config = BenchConfig(
            options=options,
            engine_url=f"http://127.0.0.1:{port}",
            request_rate=0.0 if load.from_trace else rate,
            seed=seed,
            rounds=(RoundName.PRE_WARM_UP, RoundName.QUERY),
        )
        words = ("-m", "benchmarks.arrivals", "--serve", str(port), "--gap", str(load.gap_s))
        stack.enter_context(running(port, *words)).wait("/ping")
        progress = stack.enter_context(TerminalProgress(console))
        query = run_rounds(config, progress, clock=time.monotonic).query
    if query.summary.failed:
        raise SystemExit(f"{query.summary.failed} requests failed: {query.records[0].error}")
    return {
        "sent": [record.late_s or 0.0 for record in query.records],
        "arrived": [float(record.answer.split()[0]) - (record.due_time or 0.0) for record in query.records],
    }


def workload(load: Load, requests: int, rate: float, seed: int, directory: Path) -> WorkloadOptions:
    """A workload of such requests. Those of a trace share nothing, so that all of their words are drawn anew."""
    if not load.from_trace:
        half = load.prompt_tokens // 2
        return PrefixRepetitionOptions(
            *(half, half),
            num_prefixes=10,
            output_len=load.answer_tokens,
            num_prompts=requests,
        )
    due, blocks = due_times(rate, "poisson", seed), load.prompt_tokens // BLOCK_TOKENS
    asked = [
        Request(at_s, load.prompt_tokens, load.answer_tokens, tuple(range(n * blocks, (n + 1) * blocks)), None)
        for n, at_s in enumerate(islice(due, requests))
    ]
    write(directory / "trace.jsonl", Trace.of("trace", asked))
    return TraceReplayOptions(file=str(directory / "trace.jsonl"))


def machine_late_s(requests: int, rate: float, seed: int) -> list[float]:
    """The same for a process that sleeps until the same times and does nothing."""
    began, found = time.monotonic(), []
    for due_s in islice(due_times(rate, "poisson", seed), requests):
        time.sleep(max(0.0, began + due_s - time.monotonic()))
        found.append(time.monotonic() - began - due_s)
    return found


def figures(late: Sequence[float]) -> dict[str, float]:
    ms = np.array(late) * 1e3
    return {
        "p50_ms": round(quantile(ms, 0.5), 3),
        "p99_ms": round(quantile(ms, 0.99), 3),
        "max_ms": round(float(ms.max()), 3),
        "over_goal": int((ms > GOAL_MS).sum()),
    }


def main() -> int:
    options = arguments(__doc__, requests=1000, rate=50.0, seed=42, priority=0, serve=0, gap=0.0)
    if options.serve:
        asyncio.run(serve(options.serve, options.gap))
        return 0
    if options.priority:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(options.priority))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, load in LOADS.items():
        given = (options.requests, options.rate, options.seed)
        late = {"machine": machine_late_s(*given), **late_s(load, *given)}
        found[name] = {what: figures(values) for what, values in late.items()}
        for what, each in found[name].items():
            print(f"{name:14} {what:8} {json.dumps(each)}", flush=True)
    is_met = all(each["sent"]["over_goal"] == 0 and each["arrived"]["p99_ms"] <= GOAL_MS for each in found.values())
    if options.output is not None:
        write_results(
            *(options.output, "arrivals", "python -m benchmarks.arrivals"),
            rate=options.rate,
            requests=options.requests,
            priority=options.priority,
            goal_ms=GOAL_MS,
            loads={name: each._asdict() for name, each in LOADS.items()},
            is_met=is_met,
            late=found,
        )
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
