"""What `hotspan route` adds to a request: time to the answer, CPU, and memory over a million prompts.

usage: python -m benchmarks.router_overhead [--rounds 2000] [--prompts 1000000] [--output FILE]

Two replicas that answer at once, the router and the client are processes of their own. In each round the client sends
the same new prompt straight to a replica and through the router, in an order by lot, over connections that stay open.
The figures are of the differences within rounds (p50, with the interval that holds 95 % of the medians of rounds drawn
again) and of both distributions (p99). CPU is the router's process alone, by request and by chunk of a stream, with 8
connections at work, and with one, where a process that sleeps is woken for each request. Beside it stands what uvicorn
and aiohttp take by themselves, relaying without a choice, measured in turns: of three, the best.
Memory: the same Prompts, Fleet and followers of events as the router has, asked for so many distinct prompts, without
HTTP (`--rounds 0` does that alone), from when on all that is bounded is full and forgets.
Goals: p50 < 1 ms more and <= 250 CPU-us a request at 600 B, < 2 ms more at 220 KB, memory at most 2 % more.
"""

import argparse
import asyncio
import contextlib
import gc
import http.client
import json
import random
import socket
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import psutil
import uvicorn
import uvloop

from hotspan.bench.machine import write_results
from hotspan.core.types import MIB
from hotspan.router.blocks import Blocks
from hotspan.router.event_messages import Removed, Stored
from hotspan.router.event_sync import EventSync
from hotspan.router.fleet import Fleet
from hotspan.router.index import PrefixIndex
from hotspan.router.run import settle_memory
from hotspan.router.text import Prompts
from hotspan.testing.clock import SimulatedClock
from kit.child import Child
from kit.measure import interval, quantile
from kit.ports import free_port

SMALL, LARGE = 600, 220_000
CHUNKS = 100
CONNECTIONS = 8
TURNS = 3
CHUNK_GAP_S = 0.001
P50_GOAL_MS = {"600B": 1.0, "220KB": 2.0}
CPU_GOAL_US = 250.0
GROWTH_GOAL = 0.02
DRAWS = 2000
MEMORY_MIB = 16
KEPT_PROMPTS = 32_000
"""By each replica that tells events: more than the index has room for."""

BLOCK_BYTES = 256
MAX_BLOCKS = 270_000
"""That the router knows of each: a little more than it holds. Without a word it is a million."""

TOKENS_PER_S = 20_000

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


# -- a replica ---------------------------------------------------------------------------------------------------------


class FakeReplica(asyncio.Protocol):
    """Answers at once; a stream has a chunk a millisecond."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport
        self._got = bytearray()

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, _ = bytes(self._got[:4096]).partition(b"\r\n\r\n")
        if not found:
            return
        named = {line.partition(b":")[0].lower(): line.partition(b":")[2] for line in head.split(b"\r\n")}
        length = int(named.get(b"content-length", b"0"))
        if len(self._got) < len(head) + 4 + length:
            return
        is_stream = b'"stream": true' in self._got[-64:]
        self._got.clear()
        if is_stream:
            self._stream(0)
            return
        usage = {"prompt_tokens": max(length // 4, 1), "completion_tokens": 16}
        answer = json.dumps({"choices": [{"text": "word " * 16}], "usage": usage}).encode()
        self._transport.write(_HEAD + b"content-length: %d\r\n\r\n" % len(answer) + answer)

    def _stream(self, number: int) -> None:
        if number == 0:
            self._transport.write(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        if number == CHUNKS:
            self._transport.write(b"0\r\n\r\n")
            return
        event = b'data: {"choices": [{"index": 0, "text": " word", "finish_reason": null}]}\n\n'
        self._transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        asyncio.get_running_loop().call_later(CHUNK_GAP_S, self._stream, number + 1)


async def serve_replica(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(FakeReplica, "127.0.0.1", port)
    await server.serve_forever()


async def serve_bare(port: int, replica: int) -> None:
    """A relay of uvicorn and aiohttp that decides nothing: what the two cost by themselves."""
    session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"] if name != b"host"]
        url = f"http://127.0.0.1:{replica}{scope['path']}"
        async with session.request(scope["method"], url, data=body or None, headers=headers) as answer:
            kept = [(name, value) for name, value in answer.raw_headers if name.lower() != b"transfer-encoding"]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            while part := await answer.content.readany():
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})

    config = uvicorn.Config(app, port=port, http="httptools", lifespan="off", log_level="error", access_log=False)
    async with session:
        await uvicorn.Server(config).serve()


def running(port: int, *words: str) -> Child:
    """Another process of this interpreter, that will serve a port."""
    return Child((sys.executable, *words), port)


# -- time and CPU ------------------------------------------------------------------------------------------------------


class Client:
    """One connection to each."""

    def __init__(self, ports: dict[str, int], seed: int) -> None:
        self._connections = {name: http.client.HTTPConnection("127.0.0.1", port) for name, port in ports.items()}
        for connection in self._connections.values():
            connection.connect()
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._rng = random.Random(seed)

    def body(self, size: int, *, is_stream: bool = False) -> bytes:
        """A prompt that nobody asked before."""
        text = (self._rng.randbytes(16).hex() + " word" * (size // 5))[:size]
        return json.dumps({"model": "m", "prompt": text, "stream": is_stream}).encode()

    def round(self, size: int) -> dict[str, float]:
        """Seconds to the whole answer, straight and routed."""
        body = self.body(size)
        order = self._rng.sample(list(self._connections), len(self._connections))
        return {name: self.ask(name, body) for name in order}

    def ask(self, name: str, body: bytes) -> float:
        connection = self._connections[name]
        began = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise SystemExit(f"{name}: status {answer.status}")
        return time.perf_counter() - began


def more(rows: Sequence[dict[str, float]], seed: int = 1) -> dict[str, float]:
    """What the router adds, in ms."""
    direct, routed = (np.array([row[name] for row in rows]) * 1e3 for name in ("direct", "routed"))
    added = interval(routed - direct, seed, DRAWS)
    return {
        "direct_p50_ms": float(np.median(direct)),
        "routed_p50_ms": float(np.median(routed)),
        "added_p50_ms": added.median,
        "added_p50_low_ms": added.low,
        "added_p50_high_ms": added.high,
        "direct_p99_ms": quantile(direct, 0.99),
        "routed_p99_ms": quantile(routed, 0.99),
        "added_p99_ms": quantile(routed, 0.99) - quantile(direct, 0.99),
    }


def cpu_us(
    process: psutil.Process,
    port: int,
    size: int,
    number: int,
    *,
    connections: int = CONNECTIONS,
    is_stream: bool = False,
) -> float:
    """CPU-microseconds of the router for each request."""
    clients = [Client({"routed": port}, seed=at) for at in range(connections)]

    def drive(client: Client) -> None:
        for _ in range(number // connections):
            client.ask("routed", client.body(size, is_stream=is_stream))

    threads = [threading.Thread(target=drive, args=(client,)) for client in clients]
    before = process.cpu_times()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = process.cpu_times()
    return 1e6 * (after.user + after.system - before.user - before.system) / (number // connections * connections)


def measure(rounds: int) -> dict[str, Any]:
    """Time and CPU of both sizes, and of chunks."""
    with contextlib.ExitStack() as stack:
        replicas = [free_port() for _ in range(2)]
        for port in replicas:
            stack.enter_context(running(port, "-m", "benchmarks.router_overhead", "--replica", str(port))).wait("/ping")
        front = free_port()
        named = [word for port in replicas for word in ("--replica", f"http://127.0.0.1:{port}")]
        router = stack.enter_context(running(front, "-m", "hotspan", "route", "--port", str(front), *named))
        router.wait("/ping")
        bare = free_port()
        relay = running(bare, "-m", "benchmarks.router_overhead", "--bare", str(bare), "--replica", str(replicas[0]))
        bare_process = psutil.Process(stack.enter_context(relay).wait("/ping").pid)
        process = psutil.Process(router.pid)
        figures: dict[str, Any] = {}
        for name, size, number in (("600B", SMALL, rounds), ("220KB", LARGE, max(rounds // 4, 20))):
            client = Client({"direct": replicas[0], "routed": front}, seed=1)
            for _ in range(100):
                client.round(size)
            figures[name] = more([client.round(size) for _ in range(number)])
            for end, connections in (("", CONNECTIONS), ("_one_connection", 1)):
                pairs = [
                    (
                        cpu_us(process, front, size, number, connections=connections),
                        cpu_us(bare_process, bare, size, number, connections=connections),
                    )
                    for _ in range(TURNS)
                ]
                figures[name][f"cpu_us_per_request{end}"], figures[name][f"cpu_us_bare_relay{end}"] = min(pairs)
        streams = max(rounds // 20, CONNECTIONS)
        whole = cpu_us(process, front, SMALL, streams, is_stream=True)
        figures["stream"] = {
            "chunks": CHUNKS,
            "cpu_us_per_chunk": (whole - figures["600B"]["cpu_us_per_request"]) / CHUNKS,
        }
        figures["router_rss_mib"] = process.memory_info().rss / MIB
        return figures


# -- memory ------------------------------------------------------------------------------------------------------------


class Told:
    """A replica that keeps the last prompts it got and tells so in events, whose tokens are of four bytes each."""

    def __init__(self, slot: int, prompts: Prompts, index: PrefixIndex) -> None:
        blocks = Blocks(lambda ids: array("I", ids).tobytes(), prompts.roots.of_engine, MAX_BLOCKS)
        self.follower = EventSync(slot, blocks, index, lambda is_exact, reason: None)
        self.follower.connected()
        self._kept: deque[list[int]] = deque()
        self._messages = self._blocks = 0

    @property
    def is_full(self) -> bool:
        """Whether each prompt displaces one, and each new block one that is known."""
        return len(self._kept) >= KEPT_PROMPTS and len(self.follower.blocks) >= MAX_BLOCKS

    def compute(self, text: bytes) -> None:
        """Keep a prompt, and say what came and what went."""
        hashes = list(range(self._blocks, self._blocks + len(text) // BLOCK_BYTES))
        self._blocks += len(hashes)
        events: list[Stored | Removed] = []
        if len(self._kept) >= KEPT_PROMPTS:
            events.append(Removed(list(self._kept.popleft()), medium="GPU"))
        self._kept.append(hashes)
        tokens = array("I", text[: len(hashes) * BLOCK_BYTES]).tolist()
        events.append(Stored(list(hashes), None, tokens, BLOCK_BYTES // 4, medium="GPU"))
        self.follower.live(self._messages, msgspec.msgpack.encode([0.0, events, 0]))
        self._messages += 1


def memory(prompts: int, seed: int = 1) -> dict[str, Any]:
    """Memory of this process over so many distinct prompts of 2 KB, in sessions that nobody repeats.

    Two replicas tell what they hold, of two it is assumed. The figure is the growth from when on index and replicas
    forget for each new prompt an old one, and the router for each new block one that is held no more.
    After that Python's dicts are once made anew for what is deleted from them, so the bound is from twice as many on.
    """
    reader, rng, clock = Prompts(), random.Random(seed), SimulatedClock()
    fleet = Fleet(index=PrefixIndex(MEMORY_MIB * MIB), clock=clock, rng=rng)
    told: dict[str, Told] = {}
    sent = {f"http://10.0.0.{number}:8080": 0 for number in range(4)}
    for number, name in enumerate(sent):
        slot = fleet.add(name, exact=number < 2)
        if number < 2:
            told[name] = Told(slot, reader, fleet.index)
    process, filler, samples = psutil.Process(), "word " * 400, []
    settle_memory()
    began, full_at = time.process_time(), 0
    for number in range(prompts):
        text = f"{rng.getrandbits(64):016x} {filler}"
        ask = reader.ask("/v1/completions", {}, {"prompt": text, "session_id": f"{number}"})
        ticket = fleet.dispatch(ask, fleet.choose(ask))
        sent[ticket.decision.name] += 1
        clock.advance(ask.tokens / TOKENS_PER_S)
        ticket.first_byte()
        if ticket.decision.name in told:
            told[ticket.decision.name].compute(text.encode())
        ticket.end(answer_tokens=16)
        is_sampled = (number + 1) % max(prompts // 20, 1) == 0
        if not full_at and fleet.index.evicted and all(each.is_full for each in told.values()):
            full_at, is_sampled = number + 1, True
        if is_sampled:
            gc.collect()
            samples.append({"prompts": number + 1, "rss_mib": process.memory_info().rss / MIB})
    if not 0 < full_at <= prompts / 2:
        raise SystemExit(f"the index was full after {full_at} of {prompts} prompts: give more --prompts")
    full_mib, later_mib = (
        [sample["rss_mib"] for sample in samples if sample["prompts"] >= since] for since in (full_at, 2 * full_at)
    )
    return {
        "prompts": prompts,
        "sent": list(sent.values()),
        "events": sum(each.follower.messages for each in told.values()),
        "index_cap_mib": MEMORY_MIB,
        "index_mib": fleet.index.bytes / MIB,
        "blocks": sum(len(each.follower.blocks) for each in told.values()),
        "evicted_pieces": fleet.index.evicted,
        "full_after_prompts": full_at,
        "cpu_us_per_prompt": 1e6 * (time.process_time() - began) / prompts,
        "samples": samples,
        "growth_since_full": max(full_mib) / full_mib[0] - 1,
        "growth_since_twice_that": max(later_mib) / later_mib[0] - 1,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--replica", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--bare", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.bare is not None:
        uvloop.run(serve_bare(options.bare, options.replica))
        return 0
    if options.replica is not None:
        asyncio.run(serve_replica(options.replica))
        return 0
    figures = measure(options.rounds) if options.rounds else {}
    if options.prompts:
        figures["memory"] = memory(options.prompts)
    checks = {}
    if options.rounds:
        checks = {f"{name}_p50": figures[name]["added_p50_ms"] < goal for name, goal in P50_GOAL_MS.items()}
        checks["600B_cpu"] = figures["600B"]["cpu_us_per_request"] <= CPU_GOAL_US
    if options.prompts:
        checks["memory"] = figures["memory"]["growth_since_twice_that"] <= GROWTH_GOAL
    for name, figure in figures.items():
        print(f"{name:16} {json.dumps(figure)}", flush=True)
    print(json.dumps(checks))
    if options.output is not None:
        write_results(
            *(options.output, "router-overhead", "python -m benchmarks.router_overhead"),
            goals={"added_p50_ms": P50_GOAL_MS, "cpu_us_per_request": CPU_GOAL_US, "memory_growth": GROWTH_GOAL},
            is_met=checks,
            figures=figures,
        )
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
