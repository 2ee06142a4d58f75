"""What is counted of a server while it is measured: the CPU-seconds of its processes, and what its caches say."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Self

import psutil

from hotspan.bench.records import CacheUse
from hotspan.core.errors import ConfigError
from hotspan.core.metrics_page import HITS, LOOKUPS, POOL_HITS, samples

GPU_QUERIES: Final = "vllm:prefix_cache_queries_total"
EXTERNAL_HITS: Final = "vllm:external_prefix_cache_hits_total"
EXTERNAL_QUERIES: Final = "vllm:external_prefix_cache_queries_total"
_WANTED: Final = (GPU_QUERIES, POOL_HITS, EXTERNAL_HITS, EXTERNAL_QUERIES, HITS, LOOKUPS)

_WINDOW_S: Final = 0.3
_WINDOWS: Final = 10
_IDLE_CORES: Final = 0.05


class ProcessTreeCpu:
    """Counts the CPU time of a local server, which is several processes that come and go."""

    def __init__(self, pid: int) -> None:
        """Raises: ConfigError if no such process runs here."""
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ConfigError(f"--engine-pid {pid}: no such process on this machine; give the server's pid") from error

    def seconds(self) -> float | None:
        """User + system seconds of the tree so far, or None once the root has ended.

        A process that has ended is in its parent's `children_*` times as soon as the parent has waited for it, so
        nothing has to be remembered about it. One that ends while being read is counted by reading again.
        """
        for _ in range(5):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
                return sum(_own_and_reaped_s(process) for process in processes)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                if not self._root.is_running():
                    return None
        return None


async def settled_seconds(
    seconds: Callable[[], float | None], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> float | None:
    """The CPU-seconds so far, read once what the processes do in the background has come to rest.

    Rest is less than 5 % of a core over 0.3 s; after 3 s it is read regardless. None as soon as `seconds` says None.
    """
    before = seconds()
    for _ in range(_WINDOWS):
        await sleep(_WINDOW_S)
        now = seconds()
        if before is None or now is None:
            return None
        if now - before < _IDLE_CORES * _WINDOW_S:
            return now
        before = now
    return before


def _own_and_reaped_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return float(times.user + times.system + reaped)


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """The cache counters of one scrape, in tokens, summed over engines and workers.

    pool_tokens: prompt tokens that were looked up in the engine's own prefix cache.
    """

    hit_tokens: dict[str, float]
    lookup_tokens: float | None
    pool_tokens: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """The counters in a Prometheus exposition, or None if it has none.

        hotspan's own counters tell the tiers apart. A vLLM server with another connector only says how much came from
        outside the engine: that is the tier "external". One without any has these counters, too, and never counts.
        """
        hits: defaultdict[str, float] = defaultdict(float)
        external = lookup = pool = 0.0
        has_external = has_hotspan = False
        for sample in samples(text, _WANTED):
            name, labels, value = sample.name, sample.labels, sample.value
            if name == POOL_HITS:
                hits["gpu"] += value
            elif name == GPU_QUERIES:
                hits["gpu"] += 0.0
                pool += value
            elif name == HITS:
                hits[labels.get("tier", "hotspan")] += value
                has_hotspan = True
            elif name == LOOKUPS:
                lookup += value
                has_hotspan = True
            elif name in (EXTERNAL_HITS, EXTERNAL_QUERIES):
                external += value if name == EXTERNAL_HITS else 0.0
                has_external |= value > 0
        if has_external and not has_hotspan:
            hits["external"] = external
        if not hits and not has_hotspan:
            return None
        return cls(dict(hits), lookup if has_hotspan else None, pool)

    def describe(self) -> str:
        """What a benchmark finds before it begins: which caches there are, and whether they may hold something."""
        caches = ["the engine's prefix cache"] if "gpu" in self.hit_tokens else []
        caches += ["hotspan's tiers"] if self.lookup_tokens is not None else []
        caches += ["another cache outside the engine"] if "external" in self.hit_tokens else []
        served = max(self.pool_tokens or 0.0, self.lookup_tokens or 0.0)
        state = (
            f"warm: it was asked for {served:,.0f} prompt tokens before" if served else "cold: nothing was asked yet"
        )
        return f"caches: {', '.join(caches) or 'none is on'}; {state}"

    def since(self, before: "CacheCounters | None") -> CacheUse:
        """What was counted after `before`; a counter that was absent then (or reset since) counts from zero."""
        old = before or CacheCounters({}, None)
        hits = {tier: _grown(value, old.hit_tokens.get(tier, 0.0)) for tier, value in self.hit_tokens.items()}
        lookup = None if self.lookup_tokens is None else _grown(self.lookup_tokens, old.lookup_tokens or 0.0)
        return CacheUse(hits, lookup)


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now
