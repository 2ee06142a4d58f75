"""How much RAM, which disk and which L2: a pure function of what is there and what the engine needs.

    memory that is left | reserve: a fifth, or what the processes need | CPU engine: weights, pool | RAM tiers |
    disk that is free   | reserve: a fifth, or 2 GiB                   | disk tiers                             |

What is left after the reserves is shared by all workers of the host. Where no tier was requested (`Extent.MODEST`),
RAM is limited to what the model can use and to a quarter of the memory, and nothing is written to a disk.
docs/sizing.md has the reasons.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final

from hotspan.core.types import GIB, MIB
from hotspan.plan.disk import DiskProbe
from hotspan.plan.host import Answerer, Host
from hotspan.plan.mounts import Medium
from hotspan.plan.shape import ModelShape

RESERVE: Final = 0.2
"""Share of what is there that is never taken, of memory and of disk."""

SERVER_BYTES: Final = 3 * GIB
"""What the server's and the engine core's processes of one worker take; each rank takes RANK_BYTES more."""

RANK_BYTES: Final = 2 * GIB
SHARED_RANK_BYTES: Final = 64 * MIB
"""What a rank's own messages need of /dev/shm."""

DISK_RESERVE_BYTES: Final = 2 * GIB
MIN_READ_GB_S: Final = 0.2
"""A disk that reads more slowly is left out: computing is faster for all but the largest models."""

MIN_CHUNKS: Final = 8
"""A tier that holds fewer is left out."""

MIN_BYTES: Final = 64 * MIB
MIN_DISK_BYTES: Final = GIB
MAX_CHUNKS: Final = 1 << 20
"""In one tier: each costs memory for its entry."""

MODEST: Final = 0.25
"""Share of the memory that is left which tiers may take, and a CPU engine's pool, if no tier was requested."""

USUAL_REQUESTS: Final = 32
"""Requests at a time without --max-num-seqs: LMI's default for max_rolling_batch_size."""

_STEP: Final = MIB


class Extent(Enum):
    """How much a plan may take: what the machine leaves (`--auto`), or little, because no tier was requested."""

    ALL = "all"
    MODEST = "modest"


@dataclass(frozen=True, slots=True)
class Reason:
    """One line of the table: what was decided, on what value, and why."""

    what: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class DiskChoice:
    """A disk tier for each worker: a directory of its own below `directory` where there are several."""

    directory: Path
    bytes: int


@dataclass(frozen=True, slots=True)
class TierPlan:
    """The tiers of one worker.

    ram_bytes:         0 is to serve without tiers: chunks pass through RAM on their way to all others.
    l2:                its url, as --l2 takes it.
    engine_pool_bytes: what a CPU engine may take for its own pool, to be given to it (--kv-cache-memory-bytes); None
                       for a GPU engine, or where nothing is known.
    """

    ram_bytes: int
    disk: DiskChoice | None
    l2: str | None
    engine_pool_bytes: int | None
    reasons: tuple[Reason, ...]


@dataclass(frozen=True, slots=True)
class _Engine:
    """What the engines of all workers need, and how they share."""

    shape: ModelShape | None
    sharers: int
    is_cpu: bool
    weights_bytes: int
    pool_bytes: int | None
    requests: int
    extent: Extent

    @property
    def is_modest(self) -> bool:
        return self.extent is Extent.MODEST

    @property
    def used_bytes(self) -> int | None:
        """The KV of as many texts of the model's full length as there are requests at a time; None if unknown."""
        return self.longest_bytes * self.requests or None

    @property
    def chunk_bytes(self) -> int:
        return self.shape.chunk_bytes if self.shape is not None else 0

    @property
    def ranks(self) -> int:
        return self.shape.tensor_parallel if self.shape is not None else 1

    @property
    def longest_bytes(self) -> int:
        """The KV of one text of the model's full length, and a tenth: an engine with a smaller pool does not start."""
        if self.shape is None:
            return 0
        return int(1.1 * self.shape.load_bytes(self.shape.max_tokens or 0))

    def most(self, size: int) -> int:
        """`size`, as far as a tier of so many chunks can be kept track of; whole MiB."""
        capped = min(size, MAX_CHUNKS * self.chunk_bytes) if self.chunk_bytes else size
        return max(0, capped) // _STEP * _STEP


def choose_tiers(
    host: Host,
    shape: ModelShape | None,
    *,
    workers: int = 1,
    models: int = 1,
    is_cpu_engine: bool = False,
    weights_bytes: int = 0,
    engine_pool_bytes: int | None = None,
    requests: int | None = None,
    extent: Extent = Extent.ALL,
) -> TierPlan:
    """The tiers of each worker. Never fails: what can't be had is left out, and a reason says why.

    shape:             None if the model's config can't be read.
    workers, models:   of this host: `workers` engines for each of `models` models share it equally.
    weights_bytes:     of one model; they are in memory where the engine is a CPU's.
    engine_pool_bytes: of one CPU engine, where the user said so.
    requests:          at a time, where the user said so (--max-num-seqs).
    """
    sharers = max(1, workers) * max(1, models)
    engine = _Engine(
        *(shape, sharers, is_cpu_engine, weights_bytes, engine_pool_bytes), requests or USUAL_REQUESTS, extent
    )
    reasons = [_model_reason(engine)]
    ram, pool = _ram(host, engine, reasons)
    if not ram:
        reasons.append(Reason("disk, L2", "none", "chunks pass through a RAM tier, and there is none"))
        return TierPlan(0, None, None, pool or None, tuple(reasons))
    disk = _disk(host, engine, reasons)
    return TierPlan(ram, disk, _l2(host, reasons), pool or None, tuple(reasons))


def _model_reason(engine: _Engine) -> Reason:
    shape = engine.shape
    if shape is None:
        why = "it can't be computed from the model's config: tiers are sized by the machine alone"
        return Reason("KV", "unknown", why)
    of = f"{shape.describe()}; {shape.kv_dtype}; {_count(shape.tensor_parallel, 'rank')}"
    if shape.copies > 1:
        of += (
            f", each of which holds all of it: the tiers have one copy, {shape.tier_bytes_per_token:,} bytes per token"
        )
    return Reason("KV", f"{shape.kv_bytes_per_token:,} bytes per token", f"{_size(shape.chunk_bytes)} per chunk; {of}")


# -- RAM -----------------------------------------------------------------------------------------------------------


def _ram(host: Host, engine: _Engine, reasons: list[Reason]) -> tuple[int, int | None]:
    """The RAM tier and the CPU engine's pool."""
    if host.memory is None or host.shared_memory is None:
        missing = "the available memory" if host.memory is None else "the size of /dev/shm"
        reasons.append(Reason("RAM", "none", f"{missing} is unknown: give --ram-gib"))
        return 0, engine.pool_bytes
    there = host.memory.bytes
    needed = engine.sharers * (SERVER_BYTES + engine.ranks * RANK_BYTES)
    reserve = max(int(RESERVE * there), needed)
    reasons.append(Reason("memory available", _size(there), host.memory.why))
    reasons.append(
        Reason(
            "reserve",
            _size(reserve),
            f"the larger of a fifth and {_size(needed)} for the processes of {_count(engine.sharers, 'engine')}",
        )
    )
    left = max(0, there - reserve) // engine.sharers
    modest = int(MODEST * there) // engine.sharers
    pool = None
    if engine.is_cpu:
        left, pool = _cpu_engine(engine, left, modest, reasons)
    left, limit = _least_of(engine, left, modest)
    shared = host.shared_memory
    max_shared = max(0, int(0.9 * shared.free_bytes) // engine.sharers - engine.ranks * SHARED_RANK_BYTES)
    ram = engine.most(min(left, max_shared))
    least = max(MIN_BYTES, MIN_CHUNKS * engine.chunk_bytes)
    short = "/dev/shm" if max_shared < left else "memory"
    taken = "/dev/shm minus a tenth" if max_shared < left else limit
    if ram < least:
        more = "enlarge it (docker run --shm-size, or an emptyDir with medium: Memory)"
        why = f"{short} has {_size(min(left, max_shared))} left, less than the minimum of {_size(least)}"
        reasons.append(Reason("RAM", "none", f"{why}: {more}" if short == "/dev/shm" else why))
        return 0, pool
    why = taken if ram // _STEP == min(left, max_shared) // _STEP else f"the limit of {MAX_CHUNKS:,} chunks"
    if short == "/dev/shm":
        why += f" ({_size(shared.free_bytes)} of {_size(shared.total_bytes)} free)"
    reasons.append(Reason("RAM", _size(ram), why + _share_of(engine)))
    return ram, pool


def _least_of(engine: _Engine, left: int, modest: int) -> tuple[int, str]:
    """What the RAM tier may take of the memory, and what limits it."""
    whole = "memory minus reserve, weights and the engine's pool" if engine.is_cpu else "memory minus the reserve"
    limits = [(left, whole)]
    if engine.is_modest:
        share = f"a quarter of the available memory: no tier was requested{_share_of(engine)}"
        limits.append((modest, share))
        if engine.used_bytes is not None:
            limits.append((engine.used_bytes, f"{engine.requests} texts of the model's full length"))
    return min(limits, key=lambda each: each[0])


def _cpu_engine(engine: _Engine, left: int, modest: int, reasons: list[Reason]) -> tuple[int, int]:
    """What the weights and the pool of a CPU engine leave, and the pool."""
    left = max(0, left - engine.weights_bytes)
    reasons.append(
        Reason("weights", _size(engine.weights_bytes), "a CPU engine keeps them in the same memory")
        if engine.weights_bytes
        else Reason("weights", "unknown", "the engine's pool and the RAM tier are too large by them")
    )
    if engine.pool_bytes is not None:
        reasons.append(Reason("engine's pool", _size(engine.pool_bytes), "as given"))
        return max(0, left - engine.pool_bytes), engine.pool_bytes
    longest = engine.longest_bytes
    usual, why = left // 2, "half of the memory after reserve and weights"
    if engine.is_modest:
        used = engine.used_bytes
        usual, why = min((modest, "a quarter of the available memory"), (usual, why), key=lambda each: each[0])
        if used is not None and used < usual:
            usual, why = used, f"{engine.requests} texts of the model's full length"
    pool = min(left, max(usual, longest))
    if usual < longest <= pool:
        why = "one text of the model's full length"
    if pool < longest:
        why += f"; one text of {_size(longest)} does not fit: lower --max-model-len"
    reasons.append(Reason("engine's pool", _size(pool), why))
    return left - pool, pool


# -- disk and L2 ---------------------------------------------------------------------------------------------------


def _disk(host: Host, engine: _Engine, reasons: list[Reason]) -> DiskChoice | None:
    if engine.is_modest:
        reasons.append(Reason("disk", "none", "not requested: give --disk DIR and --disk-gib N, or --auto"))
        return None
    if not host.disks:
        reasons.append(Reason("disk", "none", "no directory for it was found: give --disk DIR"))
        return None
    fit: list[tuple[DiskProbe, int]] = []
    for disk in host.disks:
        size = disk_bytes(disk, engine)
        problem = disk.problem or _unworthy(disk, size, engine)
        if problem is None:
            fit.append((disk, size))
        else:
            reasons.append(Reason(f"disk {disk.directory}", "left out", problem))
    if not fit:
        return None
    fastest = max(disk.read_gb_s or 0.0 for disk, _ in fit)
    best, size = max(
        ((disk, size) for disk, size in fit if (disk.read_gb_s or 0.0) >= fastest / 2), key=lambda each: each[1]
    )
    for disk, _ in fit:
        if disk is not best:
            reasons.append(Reason(f"disk {disk.directory}", "left out", f"slower or smaller than {best.directory}"))
    notes = "; deleted with the container" if best.medium is Medium.OVERLAY else ""
    why = f"{best.describe()}; grows as it fills; a fifth, or {_size(DISK_RESERVE_BYTES)}, stays free{notes}"
    reasons.append(Reason(f"disk {best.directory}", f"up to {_size(size)}", why + _share_of(engine)))
    return DiskChoice(best.directory, size)


def disk_bytes(disk: DiskProbe, engine: _Engine) -> int:
    """What each worker may take: of what is free, and what a tier holds there already: a restart changes nothing."""
    there = disk.free_bytes + disk.held_bytes
    left = there - max(int(RESERVE * there), DISK_RESERVE_BYTES)
    return engine.most(left // engine.sharers)


def _unworthy(disk: DiskProbe, size: int, engine: _Engine) -> str | None:
    """Why a disk that could be used is not worth it."""
    least = max(MIN_DISK_BYTES, MIN_CHUNKS * engine.chunk_bytes)
    if size < least:
        return f"it would get {_size(size)}, less than the minimum of {_size(least)}"
    if disk.read_gb_s is not None and disk.read_gb_s < MIN_READ_GB_S:
        return f"it reads {disk.read_gb_s:.2f} GB/s: below {MIN_READ_GB_S:g} GB/s, computing is faster for most models"
    return None


def _l2(host: Host, reasons: list[Reason]) -> str | None:
    daemon = host.daemon
    if daemon is None:
        return None
    why = {
        Answerer.HOTSPAN: "hotspan's daemon answers there",
        Answerer.HYPERPOD: "it accepts connections and HyperPod's shared memory is there",
        Answerer.STRANGER: f"the service at {daemon.address} is not a cache that hotspan knows",
        Answerer.NOBODY: f"no answer from {daemon.address}",
    }[daemon.who]
    reasons.append(Reason("L2", daemon.url or "none", why))
    return daemon.url


def _share_of(engine: _Engine) -> str:
    return f"; shared by {engine.sharers} engines" if engine.sharers > 1 else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _size(size: int) -> str:
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
