"""R1: kill -9. A process that works on a directory is killed at a random moment, again and again."""

import json
import os
import random
import select
import shutil
import signal
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.record import Record
from kit.measure import quantile
from kit.places import on_disk
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.faults import bad_slots
from proofs.kill_book import Book, Message
from proofs.kill_child import NAMESPACE, Worker

CLAIM = "after a kill -9 the directory opens, has what was acknowledged 1 s before, and no wrong or forgotten byte"
_LANES = 4
"""Directories that are used in turns: plain and sealed, large enough and too small."""

_BAD_PART, _BAD_KINDS = 0.05, ("read", "write", "torn")
"""So many slots of every third directory are bad. Slow ones would be waited for in real time: simulations have them."""

_MOST_SLOTS = 160

_REST_EVERY, _REST_S = 45, 1.5
"""Every so many-th life rests for so long before it is killed: the others end long before anything is a second old."""

_HUNG_S = 30.0
_SURVIVAL = 0.99
_MAX_OPEN_S = 0.5
"""CPU seconds of the median opening of several, for 100,000 chunks: what other processes take is not the opening's."""


@dataclass(frozen=True, slots=True)
class Options:
    """cycles: kills, `cycles_per_directory` of each directory.

    table_chunks: in the directory whose opening is timed.
    """

    cycles: int = 200
    cycles_per_directory: int = 250
    table_chunks: int = 100_000
    directory: Path = Path(".")
    seed: int = 0
    only: int | None = None


@dataclass(slots=True)
class _Lane:
    """A directory through its lives."""

    case: int
    path: Path
    book: Book
    rng: random.Random
    slots: int = 0
    lives: int = 0
    killed_s: float = 0.0
    set_aside: int = 0


@dataclass(slots=True)
class _Tally:
    cycles: int = 0
    early: int = 0
    opens_s: list[float] = field(default_factory=list)
    failed_opens: int = 0
    loaded: int = 0
    wrong: int = 0
    back: int = 0
    faults: int = 0
    acknowledged: int = 0
    forgotten: int = 0
    old: int = 0
    old_lost: int = 0
    young: int = 0
    young_lost: int = 0
    set_aside: int = 0
    findings: Findings = field(default_factory=Findings)


def run(options: Options, progress: Progress) -> Proof:
    """Kill after kill; then the opening of a large directory that a killed process left."""
    tally = _Tally()
    started = time.monotonic()
    with on_disk(options.directory) as path:
        first = 0
        while tally.cycles < options.cycles:
            cases = range(first, first + _LANES) if options.only is None else [options.only]
            lanes = [_lane(path, case, options.seed) for case in cases]
            for _ in range(options.cycles_per_directory):
                for lane in lanes:
                    if tally.cycles < options.cycles:
                        _cycle(lane, tally)
                progress(tally.cycles, options.cycles)
            for lane in lanes:
                tally.set_aside += lane.set_aside
                shutil.rmtree(lane.path, ignore_errors=True)
            first += _LANES
        elapsed = time.monotonic() - started
        large = _large_opens(path / "large", options.table_chunks)
    survival = 1 - tally.old_lost / max(1, tally.old)
    cpu_s, seconds = (
        sorted(one * 100_000 / options.table_chunks for one in column) for column in zip(*large, strict=True)
    )
    open_cpu_s = statistics.median(cpu_s)
    figures = {
        "cycles": tally.cycles,
        "killed_while_opening_or_looking": tally.early,
        "cycles_per_s": tally.cycles / elapsed,
        "chunks_loaded": tally.loaded,
        "wrong_bytes": tally.wrong,
        "failed_opens": tally.failed_opens,
        "frames_quarantined": tally.faults,
        "stores_acknowledged": tally.acknowledged,
        "survival_of_chunks_acknowledged_over_1_s_before": survival,
        "of_so_many": tally.old,
        "survival_of_chunks_acknowledged_later": 1 - tally.young_lost / max(1, tally.young),
        "bad_slots_set_aside": tally.set_aside,
        "invalidations_acknowledged": tally.forgotten,
        "resurrected": tally.back,
        "open_p50_ms": quantile(tally.opens_s, 0.50) * 1e3,
        "open_p99_ms": quantile(tally.opens_s, 0.99) * 1e3,
        "open_max_ms": max(tally.opens_s, default=0.0) * 1e3,
        "open_of_large_directory_chunks": options.table_chunks,
        "open_per_100k_chunks_median_cpu_s": open_cpu_s,
        "open_per_100k_chunks_median_s": statistics.median(seconds),
        "open_per_100k_chunks_max_s": seconds[-1],
    }
    enough = tally.old > 0 and tally.forgotten > 0 and tally.loaded > 0
    passed = not tally.findings.count and enough and survival >= _SURVIVAL and open_cpu_s <= _MAX_OPEN_S
    return Proof("kill", CLAIM, figures, passed, tuple(tally.findings.kept))


def _lane(path: Path, case: int, seed: int) -> _Lane:
    rng = rng_of("kill", seed, case)
    is_packed = case // 4 % 2 == 1
    size = rng.choice((16384, 24576) if is_packed else (8192, 16384, 24576))  # two pages can't shrink to one
    slot_bytes = PAGE_BYTES if is_packed else size + HEADER_BYTES
    slots = _MOST_SLOTS * (size + HEADER_BYTES) // slot_bytes
    bad = tuple(bad_slots(rng, slots, slot_bytes, _BAD_PART, _BAD_KINDS)) if case % 3 == 2 else ()
    book = Book(size, is_sealed=case % 2 == 1, is_small=case // 2 % 2 == 1, is_packed=is_packed, bad=bad)
    return _Lane(case, path / f"directory-{case}", book, rng)


def _cycle(lane: _Lane, tally: _Tally) -> None:
    """One life: fork, listen, kill."""
    chunks = len(lane.book.chunks)
    if not lane.slots or lane.rng.random() < 0.25:  # grown, shrunk
        lane.slots = (
            lane.rng.randint(chunks // 3, chunks // 2) if lane.book.is_small else chunks + lane.rng.randint(24, 64)
        )
    threads, child_seed = lane.rng.randint(1, 6), lane.rng.getrandbits(64)
    lane.lives += 1
    tally.cycles += 1
    rests = tally.cycles % _REST_EVERY == 0
    is_early = lane.rng.random() < 0.15 and not rests
    delay_s = lane.rng.uniform(0, 0.025) if is_early else lane.rng.uniform(0, 0.035) + _REST_S * rests
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(lane, threads, random.Random(child_seed), rests, reading, writing)
    os.close(writing)
    try:
        _listen(lane, pid, reading, is_early, delay_s, tally)
    finally:
        os.close(reading)


def _child(lane: _Lane, threads: int, rng: random.Random, rests: bool, reading: int, writing: int) -> None:
    """The other side of the fork; never returns."""
    try:
        os.close(reading)
        Worker(lane.path, lane.book, lane.slots, threads, lane.case << 20 | lane.lives, rng, writing, rests).live()
    except BaseException as error:
        os.write(writing, json.dumps(["broken", f"{type(error).__name__}: {error}"]).encode() + b"\n")
    finally:
        os._exit(1)


def _listen(lane: _Lane, pid: int, pipe: int, is_early: bool, delay_s: float, tally: _Tally) -> None:
    """Take in what the child tells until its time has come; then kill it, and take in what it had told by then."""
    now = time.monotonic()
    until, hung_s = (now + delay_s if is_early else now + _HUNG_S), now + _HUNG_S
    has_looked = False
    rest = b""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    is_alive = True
    while is_alive and (now := time.monotonic()) < until:
        if not poll.poll(max(0.0, until - now) * 1e3):
            continue
        data = os.read(pipe, 1 << 16)
        is_alive = bool(data)
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            _hear(lane, message, tally)
            if message[0] == "seen":
                has_looked = True
                if not is_early:
                    until = time.monotonic() + delay_s
    if is_alive and not is_early and not has_looked and time.monotonic() >= hung_s:
        tally.findings.add(lane.case, f"life {lane.lives}: opening and looking took over {_HUNG_S:g} s")
    lane.killed_s = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while data := os.read(pipe, 1 << 16):
        rest += data
    os.waitpid(pid, 0)
    for line in rest.split(b"\n")[:-1]:
        message = json.loads(line)
        has_looked |= message[0] == "seen"
        _hear(lane, message, tally)
    tally.early += not has_looked


def _hear(lane: _Lane, message: Message, tally: _Tally) -> None:
    match message:
        case ["open", seconds]:
            tally.opens_s.append(seconds)
        case ["failed", error]:
            tally.failed_opens += 1
            tally.findings.add(lane.case, f"life {lane.lives}: could not be opened: {error}")
        case ["broken", error]:
            tally.findings.add(lane.case, f"life {lane.lives}: {error}")
        case ["seen", seen, wrong, back, faults]:
            _judge(lane, [(number, version, labels) for number, version, labels in seen], tally)
            tally.loaded += len(seen)
            tally.faults += faults
            tally.wrong += len(wrong)
            tally.back += len(back)
            if wrong or back:
                tally.findings.add(lane.case, f"life {lane.lives}: wrong bytes in {wrong}, resurrected {back}")
        case ["set aside", slots]:
            lane.set_aside = slots
        case _:
            tally.acknowledged += message[0] == "stored"
            tally.forgotten += message[0] == "forgotten"
            lane.book.note(message)


def _judge(lane: _Lane, seen: list[tuple[int, int, list[int]]], tally: _Tally) -> None:
    """Hold what was found against what was acknowledged before the last kill."""
    book = lane.book
    found = {(number, version) for number, version, _ in seen}
    for stored, at_s in list(book.acknowledged.items()):
        is_old, is_lost = lane.killed_s - at_s > 1.0, stored not in found
        if is_lost:
            del book.acknowledged[stored]
        if book.may_lose or stored[0] in book.cut:
            continue  # it may have been evicted
        tally.old += is_old
        tally.old_lost += is_old and is_lost
        tally.young += not is_old
        tally.young_lost += not is_old and is_lost
    book.reopened(seen)


def _large_opens(path: Path, chunks: int, times: int = 5) -> list[tuple[float, float]]:
    """(CPU seconds, seconds) that openings take of a directory with so many chunks, each after a kill."""
    options = DiskOptions(path, chunks * (4096 + HEADER_BYTES))
    tier = DiskTier(options, NAMESPACE, 4096)
    table = tier.directory.table
    for slot in range(chunks):
        key = ChunkKey(slot.to_bytes(32, "little"))
        parent = ChunkKey((slot - 1).to_bytes(32, "little")) if slot % 16 else None
        table.put(slot, Record(key, parent, NAMESPACE, 4096, Terms(tenant=1 + slot % 7, labels=frozenset({1 + slot}))))
    table.flush()
    tier.close(60.0)
    return [_killed_open(options) for _ in range(times)]


def _killed_open(options: DiskOptions) -> tuple[float, float]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            started = time.process_time(), time.perf_counter()
            DiskTier(options, NAMESPACE, 4096)
            os.write(writing, f"{time.process_time() - started[0]} {time.perf_counter() - started[1]}".encode())
            time.sleep(60.0)
        finally:
            os._exit(1)
    os.close(writing)
    cpu_s, seconds = map(float, (os.read(reading, 128) or b"inf inf").split())
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    return cpu_s, seconds
