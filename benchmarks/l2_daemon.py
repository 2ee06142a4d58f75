"""The node's daemon: chunks copied out of its memory against memcpy, and how long look-ups take.

usage: python -m benchmarks.l2_daemon [--size-gib 1.5] [--repetitions 9] [--output benchmarks/results/l2-daemon.json]
       python -m benchmarks.l2_daemon --disk DIR [...]          also what comes back from disk

A daemon of its own is started. Copies: 14 MiB chunks that together exceed the CPU's caches, through DaemonStore (one
look-up for all of them, then each read under a lease of its own), and by memcpy from a private buffer of the same size
into the same destinations, chunk by chunk in turns; the figure is the ratio of the medians. Look-ups: 400 keys that are
all there, in one call; the first that a replica makes decodes and checks every record, a later one only what changed.
An empty HTTP request over a kept connection is shown beside them: what any one batched HTTP call would cost at least.
Disk: a second daemon with a slab in DIR, filled with four times what its memory holds. Four threads read chunks that
are on disk only, through DaemonStore, and four threads read as many bytes of the slab itself, with O_DIRECT in pieces
of 4 MiB, in turns; the figure is the ratio of the medians.
"""

import contextlib
import http.client
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.shared_memory import populate
from hotspan.core.terms import Terms
from hotspan.core.types import GIB, MIB, ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES
from hotspan.l2.daemon import DaemonStore
from hotspan.tiers.record import Record
from kit.child import Child

CHUNK_BYTES = 14 * MIB
KEYS = 400
SMALL_BYTES = 4096
THREADS = 4
COPY_GOAL = 0.9
LOOKUP_GOAL_US = 300


@dataclass(frozen=True, slots=True)
class Running:
    """A daemon that answers."""

    unix_socket: Path
    port: int


@contextlib.contextmanager
def daemon(size_gib: float, *options: str) -> Iterator[Running]:
    """A daemon on a free port, gone afterwards."""
    name = f"hotspan-bench-{os.getpid()}"
    command = [sys.executable, "-m", "hotspan", "daemon", "--size-gib", f"{size_gib}", "--port", "0"]
    with Child([*command, "--shared-memory-name", name, *options], is_read=True) as process:
        ready = process.line()
        if "is ready" not in ready:
            raise SystemExit("the daemon did not start: is there room in /dev/shm?")
        yield Running(Path(f"/dev/shm/{name}.sock"), int(ready.split("127.0.0.1:")[1].split()[0]))


def buffer(size: int) -> memoryview:
    """Memory that is there, on pages of the size that /dev/shm has unless it was mounted with huge ones."""
    memory = mmap.mmap(-1, size)
    populate(memory)
    return memoryview(memory)


def copies(running: Running, chunks: int, repetitions: int) -> dict[str, list[float]]:
    """GB/s of each chunk in each round: out of the store and into it, and by memcpy."""
    frame = HEADER_BYTES + CHUNK_BYTES
    records = [Record(ChunkKey(os.urandom(32)), None, bytes(32), CHUNK_BYTES, Terms()) for _ in range(chunks)]
    source, target = buffer(chunks * frame), buffer(chunks * frame)
    pieces = [slice(n * frame, (n + 1) * frame) for n in range(chunks)]
    into, out = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    store = DaemonStore(running.unix_socket)
    rates: dict[str, list[float]] = {"put": [], "get": [], "memcpy": []}

    def timed(name: str, job: Callable[[], object]) -> None:
        started = time.perf_counter()
        done = job()
        rates[name].append(frame / (time.perf_counter() - started) / 1e9)
        if done is False:
            raise SystemExit("a chunk was there already, or gone: the figures would mean nothing")

    for round in range(-1, repetitions):  # the first touches all pages
        store.delete([record.key for record in records])
        for record, piece in zip(records, pieces, strict=True):
            timed("put", partial(store.put, record, [source[piece]]))
        for place, one in enumerate(store.find([record.key for record in records])):
            if one is None:
                raise SystemExit("a chunk is gone: the figures would mean nothing")
            piece = pieces[place]
            pair: dict[str, Callable[[], object]] = {
                "get": partial(store.get, one, [target[piece]]),
                "memcpy": partial(np.copyto, into[piece], out[piece]),
            }
            for name in sorted(pair, reverse=bool((place + round) % 2)):
                timed(name, pair[name])
        if round < 0:
            rates = {name: [] for name in rates}
    store.delete([record.key for record in records])
    store.close()
    return rates


def lookups(running: Running, repetitions: int) -> dict[str, list[float]]:
    """Microseconds of each look-up of 400 keys, and of an empty HTTP request."""
    store = DaemonStore(running.unix_socket)
    keys = [ChunkKey(os.urandom(32)) for _ in range(KEYS)]
    parents = [None, *keys]
    frame = memoryview(bytes(HEADER_BYTES + SMALL_BYTES))
    for place, (key, parent) in enumerate(zip(keys, parents, strict=False)):
        terms = Terms(tenant=7, labels=frozenset([1, 2]), generation=5)
        store.put(Record(key, parent, bytes(32), SMALL_BYTES, terms, place, place), [frame])
    client = http.client.HTTPConnection("127.0.0.1", running.port)

    def again(find: Callable[[], Any]) -> float:
        started = time.perf_counter()
        found = find()
        seconds = time.perf_counter() - started
        if found is not None and None in found:
            raise SystemExit("a key was not found: the figures would mean nothing")
        return seconds * 1e6

    def first() -> float:
        with contextlib.closing(DaemonStore(running.unix_socket)) as fresh:
            fresh.usage()  # connects
            return again(lambda: fresh.find(keys))

    def request() -> None:
        client.request("GET", "/health")
        client.getresponse().read()

    times: dict[str, list[float]] = {"again": [], "first": [], "nothing": [], "http": []}
    for _ in range(50 * repetitions):
        times["again"].append(again(lambda: store.find(keys)))
        times["first"].append(first())
        times["nothing"].append(again(lambda: store.usage() and None))
        times["http"].append(again(request))
    client.close()
    store.delete(keys)
    store.close()
    return times


def from_disk(directory: Path, repetitions: int) -> dict[str, list[float]]:
    """GB/s of each round: of chunks through the daemon, and of the same number of bytes of its slab."""
    memory_gib, frame = 0.25, HEADER_BYTES + CHUNK_BYTES
    count = 4 * int(memory_gib * GIB) // (frame + PREAMBLE_BYTES)
    records = [Record(ChunkKey(os.urandom(32)), None, bytes(32), CHUNK_BYTES, Terms()) for _ in range(count)]
    some = count // 8  # of a round: fewer than memory holds, so that each is on disk only when its turn comes
    source, targets = buffer(frame), [buffer(frame) for _ in range(THREADS)]
    rates: dict[str, list[float]] = {"get": [], "slab": []}
    slab_gib = 1.25 * count * (frame + PREAMBLE_BYTES) / GIB  # a chunk takes whole slots, so more than its bytes
    with daemon(memory_gib, "--disk", str(directory), "--disk-gib", f"{slab_gib}") as running:
        store, client = DaemonStore(running.unix_socket), http.client.HTTPConnection("127.0.0.1", running.port)

        def disk_objects() -> int:
            client.request("GET", "/v1/stats")
            return int(json.loads(client.getresponse().read())["disk_objects"])

        for number, record in enumerate(records):
            store.put(record, [source])
            while disk_objects() <= number:
                time.sleep(0.001)
        slab = os.open(directory / "slab", os.O_RDONLY | os.O_DIRECT)

        def get(target: memoryview, record: Record) -> bool:
            (found,) = store.find([record.key])
            return found is not None and store.get(found, [target])

        def read(target: memoryview, place: int) -> bool:
            at = place * (frame + PREAMBLE_BYTES)
            pieces = [target[start : start + 4 * MIB] for start in range(0, frame, 4 * MIB)]
            return all(os.preadv(slab, [piece], at + n * 4 * MIB) == len(piece) for n, piece in enumerate(pieces))

        def timed(job: Callable[[memoryview, Any], bool], what: list[Any]) -> float:
            def each(thread: int) -> bool:
                return all(job(targets[thread], one) for one in what[thread::THREADS])

            started = time.perf_counter()
            if not all(threads.map(each, range(THREADS))):
                raise SystemExit("a chunk is gone: the figures would mean nothing")
            return len(what) * frame / (time.perf_counter() - started) / 1e9

        with ThreadPoolExecutor(THREADS) as threads:
            for round in range(repetitions):
                places = [(round * some + n) % count for n in range(some)]
                rates["get"].append(timed(get, [records[place] for place in places]))
                rates["slab"].append(timed(read, places))
        os.close(slab)
        client.close()
        store.close()
    return rates


def main() -> int:
    options = arguments(__doc__, size_gib=1.5, repetitions=9, disk=Path)
    chunks = int(options.size_gib * GIB - MIB) // (CHUNK_BYTES + HEADER_BYTES + PREAMBLE_BYTES)
    with daemon(options.size_gib) as running:
        rates = copies(running, chunks, options.repetitions)
        times = lookups(running, options.repetitions)
    rate = {name: statistics.median(values) for name, values in rates.items()}
    ratio, put_ratio = rate["get"] / rate["memcpy"], rate["put"] / rate["memcpy"]
    us = {name: statistics.median(values) for name, values in times.items()}
    print(f"get of {chunks} x 14 MiB: {rate['get']:.2f} GB/s, memcpy {rate['memcpy']:.2f}, ratio {ratio:.3f}", end="")
    print(f" (goal {COPY_GOAL}); put {rate['put']:.2f} GB/s, ratio {put_ratio:.3f}")
    print(
        f"look-up of {KEYS} keys: {us['again']:.0f} us (goal {LOOKUP_GOAL_US}), a replica's first {us['first']:.0f} us"
    )
    print(f"round trip of the Unix socket {us['nothing']:.0f} us, of HTTP {us['http']:.0f} us")
    below = from_disk(options.disk, options.repetitions) if options.disk is not None else {}
    if below:
        get, slab = (statistics.median(below[name]) for name in ("get", "slab"))
        print(f"from disk {get:.2f} GB/s, the slab itself {slab:.2f}, ratio {get / slab:.3f}")
    if options.output is not None:
        figures: dict[str, Any] = {
            "get": {"GB/s": rates["get"], "memcpy_GB/s": rates["memcpy"], "ratio": ratio, "goal": COPY_GOAL},
            "put": {"GB/s": rates["put"], "ratio": put_ratio},
            "lookup": {f"{name}_us": sorted(values) for name, values in times.items()}
            | {f"{name}_median_us": value for name, value in us.items()}
            | {"keys": KEYS, "goal_us": LOOKUP_GOAL_US},
        }
        if below:
            figures["disk"] = {"GB/s": below["get"], "slab_GB/s": below["slab"], "ratio": get / slab}
        settings = {"size_gib": options.size_gib, "chunk_bytes": CHUNK_BYTES, "repetitions": options.repetitions}
        write_results(options.output, "l2-daemon", "python -m benchmarks.l2_daemon", settings=settings, figures=figures)
        print(f"written: {options.output}")
    return 0 if ratio >= COPY_GOAL and us["again"] < LOOKUP_GOAL_US else 1


if __name__ == "__main__":
    sys.exit(main())
