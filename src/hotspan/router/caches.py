"""Tiers and tenants of all replicas together, for the dashboard.

Replicas are asked while somebody looks, and never for a request that is routed. What they answer is bounded in size,
names and numbers: a replica that answers anything else is left out, by name.
"""

import asyncio
import heapq
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from hotspan.core.clock import Clock
from hotspan.core.metrics_page import CAPACITY, HITS, LOOKUPS, POOL, POOL_HITS, TOKEN_BYTES, samples
from hotspan.core.types import Tier
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream

MAX_TENANTS = 100
"""That are told of, those with the most bytes first; the others are counted."""

_FIGURES_S, _CONTENTS_S = 1.5, 10.0
"""How long what was read holds, of metrics and of contents, for which an engine core is asked."""

_WITHIN_S = 2.0
_METRICS, _STORED = "/metrics", "/hotspan/cache"
_MAX_BYTES = {_METRICS: 2 << 20, _STORED: 1 << 20}
"""Of one answer. A page of metrics has about 200 KiB, contents have about 100 bytes per tenant."""

_MAX_COUNTS = 16_384
"""Of tenants in one replica's contents: of 5,000 tenants in RAM, on disk, and of tokens."""

_MAX_COUNT = 1 << 53
"""Bytes or tokens of a replica, and the largest whole number that a browser has: 8 PiB."""

_AT_ONCE = 64

_USED: Final = "hotspan_cache_used_bytes"
_UP: Final = "hotspan_cache_tier_up"
_EVICTED: Final = "hotspan_cache_evictions_total"
_POOL_USED: Final = "vllm:kv_cache_usage_perc"
_WANTED: Final = (LOOKUPS, HITS, _USED, CAPACITY, _UP, _EVICTED, TOKEN_BYTES, POOL_HITS, _POOL_USED, POOL)

Json = dict[str, Any]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class TierFigures:
    """One tier of one replica, all its engine cores together.

    evicted_chunks: since its start, by this replica; None if its medium evicts by itself, or never does.
    """

    used_bytes: float
    capacity_bytes: float
    hit_tokens: float
    is_up: bool = True
    evicted_chunks: float | None = None


@dataclass(frozen=True, slots=True)
class ReplicaFigures:
    """What a replica's metrics tell; tokens since its start."""

    lookup_tokens: float
    tiers: Mapping[Tier, TierFigures]


class TenantFigures(NamedTuple):
    """Bytes at the tier's mean size of a chunk; tokens that were loaded since the start."""

    ram_bytes: int = 0
    disk_bytes: int = 0
    hit_tokens: int = 0

    def and_also(self, other: "TenantFigures") -> "TenantFigures":
        """The sum of both."""
        return TenantFigures(*(min(one + two, _MAX_COUNT) for one, two in zip(self, other, strict=True)))


Tenants = Mapping[str, TenantFigures]


@dataclass(frozen=True, slots=True)
class Contents:
    """What `/hotspan/cache` of a replica tells. store: names the L2 among all; "" if it is not known."""

    tenants: Tenants
    store: str = ""


Figures = Mapping[str, ReplicaFigures | str]
"""By replica; a text in place of figures says why there are none."""

Stored = Mapping[str, Contents | str]
"""The same."""


# -- what a replica answers --------------------------------------------------------------------------------------------


def figures_in(page: bytes) -> ReplicaFigures | None:
    """The figures of a page of metrics; None if it has none of tiers. Impossible values and unknown tiers are left out.

    All engine cores of a server report the same L2: the largest counts. Their pools have one size.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for sample in samples(page.decode(errors="replace"), _WANTED):
        value = sample.value
        if sample.name == POOL:
            said = sample.labels.get("kv_cache_size_tokens", "")
            value = float(said) if said.isdecimal() and len(said) <= 15 else 0.0
        if 0 <= value <= _MAX_COUNT:
            found.setdefault((sample.name, sample.labels.get("tier", "")), []).append(value)

    def total(name: str, tier: str = "") -> float:
        return min(sum(found.get((name, tier), ())), float(_MAX_COUNT))

    def largest(name: str, tier: str = "") -> float:
        return max(found.get((name, tier), ()), default=0.0)

    tiers: dict[Tier, TierFigures] = {}
    if (POOL_HITS, "") in found or (POOL, "") in found:
        token_bytes = largest(TOKEN_BYTES)
        size = min(total(POOL) * token_bytes, float(_MAX_COUNT))
        used = min(total(_POOL_USED) * largest(POOL) * token_bytes, size)
        tiers[Tier.GPU] = TierFigures(used, size, total(POOL_HITS))
    for tier in (Tier.RAM, Tier.DISK, Tier.L2):
        name, add = tier.value, largest if tier is Tier.L2 else total
        if (CAPACITY, name) in found:
            is_up = all(found.get((_UP, name), ()))
            evicted = total(_EVICTED, name) if (_EVICTED, name) in found else None
            tiers[tier] = TierFigures(add(_USED, name), add(CAPACITY, name), total(HITS, name), is_up, evicted)
    return ReplicaFigures(total(LOOKUPS), tiers) if tiers.keys() - {Tier.GPU} else None


_Count = Annotated[int, msgspec.Meta(ge=0, le=_MAX_COUNT)]
_Counts = dict[Annotated[str, msgspec.Meta(max_length=128)], _Count]


class _Tier(msgspec.Struct, frozen=True, gc=False):
    chunks: _Count = 0
    bytes: _Count = 0
    tenants: _Counts = {}
    store: Annotated[str, msgspec.Meta(max_length=128)] | None = None


_NONE = _Tier()


class _Tiers(msgspec.Struct, frozen=True, gc=False):
    ram: _Tier = _NONE
    disk: _Tier = _NONE
    l2: _Tier = _NONE


class _Core(msgspec.Struct, frozen=True, gc=False):
    tiers: _Tiers
    hit_tokens: _Counts = {}


class _Answer(msgspec.Struct, frozen=True, gc=False):
    replicas: list[_Core]


_DECODER = msgspec.json.Decoder(_Answer)


def contents_in(answer: bytes) -> Contents | None:
    """What an answer of `/hotspan/cache` tells; None if it is none, or too long. Impossible names are left out."""
    try:
        cores = _DECODER.decode(answer).replicas
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    found = list[tuple[str, TenantFigures]]()
    for core in cores:
        ram, disk = core.tiers.ram, core.tiers.disk
        if len(found) + len(ram.tenants) + len(disk.tenants) + len(core.hit_tokens) > _MAX_COUNTS:
            return None
        found += [(name, TenantFigures(ram_bytes=_share(ram, chunks))) for name, chunks in ram.tenants.items()]
        found += [(name, TenantFigures(disk_bytes=_share(disk, chunks))) for name, chunks in disk.tenants.items()]
        found += [(name, TenantFigures(hit_tokens=tokens)) for name, tokens in core.hit_tokens.items()]
    store = next((core.tiers.l2.store for core in cores if core.tiers.l2.store), "")
    return Contents(_added((name, each) for name, each in found if name.isprintable()), store)


def _share(tier: _Tier, chunks: int) -> int:
    return tier.bytes * min(chunks, tier.chunks) // tier.chunks if tier.chunks else 0


def _added(found: Iterable[tuple[str, TenantFigures]]) -> Tenants:
    tenants: dict[str, TenantFigures] = {}
    for name, figures in found:
        tenants[name] = tenants[name].and_also(figures) if name in tenants else figures
    return tenants


# -- all replicas together ---------------------------------------------------------------------------------------------


def tenants_together(stored: Stored) -> Json:
    """Tenants summed over the replicas that told of them, those with the most bytes first, and how many there are."""
    told = [each.tenants for each in stored.values() if isinstance(each, Contents)]
    tenants = _added(item for each in told for item in each.items())

    def rank(name: str) -> tuple[int, int, str]:
        figures = tenants[name]
        return -figures.ram_bytes - figures.disk_bytes, -figures.hit_tokens, name

    first = heapq.nsmallest(MAX_TENANTS, tenants, key=rank)
    return {"tenants": [{"tenant": name} | tenants[name]._asdict() for name in first], "tenant_count": len(tenants)}


def tiers_together(figures: Figures, stored: Stored) -> Json:
    """Tiers summed over the replicas that have figures; of each replica its tokens, and what is missing and why."""
    counted = {name: each for name, each in figures.items() if isinstance(each, ReplicaFigures)}
    summed = (_summed(tier, counted, stored) for tier in Tier)
    return {
        "replicas": [_shown(name, each, stored[name]) for name, each in figures.items()],
        "lookup_tokens": sum(each.lookup_tokens for each in counted.values()),
        "tiers": [tier for tier in summed if tier is not None],
    }


def _shown(name: str, figures: ReplicaFigures | str, contents: Contents | str) -> Json:
    shown: Json = {"replica": name, "tenants_missing": contents if isinstance(contents, str) else ""}
    if isinstance(figures, str):
        return shown | {"missing": figures}
    hits = {tier.value: each.hit_tokens for tier, each in figures.tiers.items()}
    return shown | {"missing": "", "lookup_tokens": figures.lookup_tokens, "hit_tokens": hits}


def _summed(tier: Tier, counted: Mapping[str, ReplicaFigures], stored: Stored) -> Json | None:
    """One tier of all replicas; None if none has it.

    Replicas with one L2 report the same bytes of it: of each store the largest count. Those whose store is not known
    are taken to have that of the first. What each evicted from it, no other did: those are added up.
    """
    have = {name: each.tiers[tier] for name, each in counted.items() if tier in each.tiers}
    if not have:
        return None
    evicted = [each.evicted_chunks for each in have.values() if each.evicted_chunks is not None]
    groups, shared = [[each] for each in have.values()], Json()
    if tier is Tier.L2:
        stores = {name: _store(stored[name]) for name in have}
        first, by_store = next(filter(None, stores.values()), ""), dict[str, list[TierFigures]]()
        for name, each in have.items():
            by_store.setdefault(stores[name] or first, []).append(each)
        groups = list(by_store.values())
        shared = {"stores": len(groups), "is_assumed": len(have) > 1 and not all(stores.values())}
    return shared | {
        "tier": tier.value,
        "replicas": len(have),
        "replicas_up": sum(each.is_up for each in have.values()),
        "hit_tokens": sum(each.hit_tokens for each in have.values()),
        "used_bytes": sum(max(each.used_bytes for each in group) for group in groups),
        "capacity_bytes": sum(max(each.capacity_bytes for each in group) for group in groups),
        "evicted_chunks": sum(evicted) if evicted else None,
    }


def _store(contents: Contents | str) -> str:
    return contents.store if isinstance(contents, Contents) else ""


# -- reading -----------------------------------------------------------------------------------------------------------


class FleetCaches:
    """Reads the replicas when it is asked, not more often than needed. One event loop's.

    is_down: whether a replica's health check fails: it is not asked.
    """

    def __init__(
        self, names: Collection[str], upstream: Upstream, is_down: Callable[[str], bool], clock: Clock
    ) -> None:
        self._names = tuple(names)
        self._upstream = upstream
        self._is_down = is_down
        self._clock = clock
        self._reading = asyncio.Lock()
        self._at_once = asyncio.Semaphore(_AT_ONCE)
        self._parsing = asyncio.Lock()  # one answer at a time, on another thread: requests go on meanwhile
        self._credentials: str | None = None
        self._figures_s = self._stored_s = 0.0
        self._figures: Figures = {}
        self._stored: Stored = {}
        self._tenants = Json()

    async def read(self, credentials: str) -> Json:
        """What the replicas hold, as of some seconds ago at most. Blocks: twice 2 s if some do not answer.

        credentials: `Authorization` of who asks, for the replicas; "" is none. What was read with them is shown to
                     nobody else.
        """
        async with self._reading:  # those who look at the same time share one reading
            now_s, is_other = self._clock.monotonic(), credentials != self._credentials
            self._credentials = None  # until all is read
            if is_other or now_s - self._figures_s >= _FIGURES_S:
                self._figures, self._figures_s = await self._all(_METRICS, credentials, _figures), now_s
            if is_other or now_s - self._stored_s >= _CONTENTS_S:
                self._stored, self._stored_s = await self._all(_STORED, credentials, _contents), now_s
                self._tenants = await asyncio.to_thread(tenants_together, self._stored)
            self._credentials = credentials
            return tiers_together(self._figures, self._stored) | self._tenants

    async def _all(self, path: str, credentials: str, read: Callable[[bytes], _T | str]) -> dict[str, _T | str]:
        found = await asyncio.gather(*(self._one(name, path, credentials, read) for name in self._names))
        return dict(zip(self._names, found, strict=True))

    async def _one(self, name: str, path: str, credentials: str, read: Callable[[bytes], _T | str]) -> _T | str:
        if self._is_down(name):
            return "is down"
        headers = [("authorization", credentials)] if credentials else []
        try:
            async with self._at_once:
                status, answer = await self._upstream.fetch(
                    name, path, headers=headers, within_s=_WITHIN_S, max_bytes=_MAX_BYTES[path]
                )
        except UnreachedError:
            return "does not answer"
        except BrokenError:
            return "sent a broken answer, or too large a one"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return "wants an admin token: start router and replicas with the same one"
        if status == HTTPStatus.CONFLICT:
            return "has no cache"
        if status != HTTPStatus.OK:
            return f"answers with status {status}"
        async with self._parsing:
            return await asyncio.to_thread(read, answer)


def _figures(page: bytes) -> ReplicaFigures | str:
    return figures_in(page) or "has no figures of tiers: no request came yet, or it has no cache"


def _contents(answer: bytes) -> Contents | str:
    found = contents_in(answer)
    return found if found is not None else "sent no contents, or those of too many tenants"
