"""R10: a soak. Churn over a real disk for as long as is asked for: no wrong byte, and nothing grows.

One of the three caches has a disk of which slots are bad, at random: it serves the others.
"""

import contextlib
import os
import random
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hotspan.bench.storage import BenchKeys
from hotspan.cache.tiered import TieredCache
from hotspan.core.clock import SystemClock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import PAGE_BYTES, ChunkKey, Tier
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.packer import Packer
from hotspan.tiers.shares import Share, Shares
from hotspan.tiers.slab import SharedSlab
from hotspan.tiers.table import DiskTable
from kit.places import on_disk
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.faults import BadPlaces, bad_slots
from kit.simulated.lower import steady
from proofs.disk import NAMESPACE
from proofs.engine import Broken, Engine, texts

CLAIM = "churn of many times the capacity leaves no wrong byte, and memory, descriptors and disk stay as they are"
_PAYLOAD_BYTES = 16384
_RAM_SLOTS = 48
_TENANTS, _TEXTS = 6, 20
_KINDS = ("read", "write", "torn")
"""Of bad slots. Slow ones would be waited for in real time; the simulations have them."""

_WARM_UP = 0.1
_MIN_CHURN = 10.0
_MAX_DRIFT = 0.01
_SHARES = Shares(by_tenant={3: Share(floor=0.1, quota=0.3)})


@dataclass(frozen=True, slots=True)
class Options:
    """hours: how long. duty: part of one core to use. sample_s: between samples; a sixtieth of the time at most.

    slots: of each disk tier. bad_part: of them, of the disk that has bad ones.
    """

    hours: float = 1.0
    duty: float = 0.2
    slots: int = 192
    sample_s: float = 60.0
    directory: Path = Path(".")
    bad_part: float = 0.05
    seed: int = 0


@dataclass(slots=True)
class Samples:
    """What may grow, each minute after the warm-up."""

    rss_bytes: list[float] = field(default_factory=list)
    fds: list[float] = field(default_factory=list)
    shared_bytes: list[float] = field(default_factory=list)
    disk_blocks: list[float] = field(default_factory=list)

    def take(self, path: Path) -> None:
        self.rss_bytes.append(_status_bytes("VmRSS"))
        self.fds.append(len(os.listdir("/proc/self/fd")))
        self.shared_bytes.append(_status_bytes("RssShmem"))
        self.disk_blocks.append(sum(file.stat().st_blocks for file in path.rglob("*") if file.is_file()))

    def drifts(self) -> dict[str, float]:
        """By how much the median of the last quarter exceeds that of the first, as a part of it."""
        return {name: drift(getattr(self, name)) for name in Samples.__slots__}


def drift(samples: list[float]) -> float:
    """From the median of the first quarter to that of the last, as a part of the first."""
    quarter = max(1, len(samples) // 4)
    if not samples or not statistics.median(samples[:quarter]):
        return 0.0
    return statistics.median(samples[-quarter:]) / statistics.median(samples[:quarter]) - 1


@dataclass(slots=True)
class _Side:
    """One cache with its engine: plain, sealed, or on a disk with bad slots."""

    name: str
    engine: Engine
    slab: SharedSlab
    tier: DiskTier
    rng: random.Random
    slots: int
    stored_bytes: int = 0

    def turn(self) -> None:
        """A burst of what an engine does. Raises: Broken."""
        engine = self.engine
        for _ in range(3):
            engine.arrive()
            engine.cache.wait(0.0005)
            engine.step()
            for request in list(engine.requests):
                engine.ask(request)
            while engine.stores:
                engine.end_store()
            while engine.loads:
                engine.end_load()
        if self.rng.random() < 0.02:
            engine.invalidate()
        engine.check()
        self.stored_bytes += engine.cache.take_stats().store_bytes[Tier.DISK]

    @property
    def churn(self) -> float:
        return self.stored_bytes / (self.slots * _PAYLOAD_BYTES)


def run(options: Options, progress: Progress) -> Proof:
    """Churn until the time is over."""
    total_s = options.hours * 3600
    sample_s = min(options.sample_s, total_s / 60)
    findings, samples = Findings(), Samples()
    with on_disk(options.directory) as path, _sides(path, options) as sides:
        started = time.monotonic()
        next_s = started + _WARM_UP * total_s
        cpu_s = time.process_time()
        while (now := time.monotonic()) < started + total_s and not findings.count:
            for side in sides:
                try:
                    side.turn()
                except Broken as error:
                    findings.add(0, f"{side.name}, after {now - started:.0f} s: {error}")
            if now >= next_s:
                samples.take(path)
                next_s += sample_s
                progress(int(now - started), int(total_s))
            used_s = time.process_time() - cpu_s
            time.sleep(min(1.0, max(0.0, used_s / options.duty - (time.monotonic() - started))))
        elapsed_s = time.monotonic() - started
        used_s = time.process_time() - cpu_s
        bad = sides[2].tier.usage()
        for side in sides:
            try:
                side.engine.end(partial(side.tier.wait, 0.01))
            except Broken as error:
                findings.add(0, f"{side.name}, at the end: {error}")
    counts = [side.engine.counts for side in sides]
    drifts = samples.drifts()
    churn = min(side.churn for side in sides)
    figures = {
        "hours": elapsed_s / 3600,
        "duty": used_s / elapsed_s,
        "churn_over_capacity_plain": sides[0].churn,
        "churn_over_capacity_sealed": sides[1].churn,
        "churn_over_capacity_bad": sides[2].churn,
        "bad_slots": bad.bad_slots,
        "room_with_bad_slots": bad.capacity_chunks / options.slots,
        "used_with_bad_slots": bad.chunks / options.slots,
        "hits": sum(count.hits for count in counts),
        "of_them_from_disk": sum(count.disk_hits for count in counts),
        "stores": sum(count.stores for count in counts),
        "invalidations": sum(count.invalidations for count in counts),
        "invalidations_acknowledged": sum(count.acknowledged for count in counts),
        "wrong_bytes": findings.count,
        "samples": len(samples.fds),
        **{f"drift_of_{name}": value for name, value in drifts.items()},
        "rss_mib_first": samples.rss_bytes[0] / (1 << 20) if samples.rss_bytes else 0.0,
        "rss_mib_last": samples.rss_bytes[-1] / (1 << 20) if samples.rss_bytes else 0.0,
    }
    steady = all(value < _MAX_DRIFT for value in drifts.values())
    has_room = bad.bad_slots > 0 and bad.capacity_chunks >= round((1 - options.bad_part) * options.slots)
    passed = not findings.count and churn >= _MIN_CHURN and steady and len(samples.fds) >= 4 and has_room
    return Proof("soak", CLAIM, figures, passed, tuple(findings.kept))


@contextlib.contextmanager
def _sides(path: Path, options: Options) -> Iterator[list[_Side]]:
    clock, sides = SystemClock(), []
    try:
        for number, name in enumerate(("plain", "sealed", "bad")):
            rng = rng_of("soak", options.seed, number)
            slab = SharedSlab(f"soak-{uuid.uuid4().hex}", _RAM_SLOTS, _PAYLOAD_BYTES)
            slab.unlink()
            slot_bytes = _PAYLOAD_BYTES + HEADER_BYTES
            places = bad_slots(rng, options.slots, slot_bytes, options.bad_part, _KINDS) if name == "bad" else []
            disk = DiskOptions(
                path / name,
                options.slots * slot_bytes,
                keys=BenchKeys() if name == "sealed" else None,
                shares=_SHARES,
                packer=Packer("always" if name == "sealed" else "never", 4, clock),
                slot_bytes=PAGE_BYTES if name == "sealed" else None,
                files=BadPlaces(places) if name == "bad" else Files(),
            )
            tier = DiskTier(disk, NAMESPACE, _PAYLOAD_BYTES)
            cache = TieredCache(slab, steady(tier), namespace=NAMESPACE, shares=_SHARES, patience_s=1.0)
            below = partial(_keys_in, tier.directory.table)
            engine = Engine(
                *(cache, clock, texts(_TENANTS, _TEXTS, ttl_s=600), rng, _PAYLOAD_BYTES, below),
                patience_s=5.0,
            )
            sides.append(_Side(name, engine, slab, tier, rng, options.slots))
        yield sides
    finally:
        for side in sides:
            side.engine.cache.close(10.0)


def _keys_in(table: DiskTable) -> set[ChunkKey]:
    return {table.key(slot) for slot in table.slots()}


def _status_bytes(name: str) -> int:
    """What the kernel counts of this process: all that is resident, or (RssShmem) shared memory, named or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
