"""Speed and capacity of the replicas, read from their metrics every few seconds."""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hotspan.core.errors import ConfigError
from hotspan.core.metrics_page import CAPACITY, POOL, TOKEN_BYTES, figures
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.router.fleet import Fleet
from hotspan.router.load import TOLD_EVERY_S, Speeds, TierSpeed
from hotspan.router.types import Medium

_PATH = "/metrics"
_TIMEOUT_S = 2.0
_WANTED = (
    "hotspan_cost_prefill_tokens_per_second",
    "hotspan_cost_latency_seconds",
    "hotspan_cost_bytes_per_second",
    CAPACITY,
    TOKEN_BYTES,
    "hotspan_blend_up",
    POOL,
)
_TIERS = {"ram": Medium.RAM, "disk": Medium.DISK, "l2": Medium.L2}


async def follow_metrics(fleet: Fleet, upstream: Upstream, interval_s: float = TOLD_EVERY_S) -> None:
    """Read them for a fleet until cancelled; a replica that does not show such metrics keeps what was learnt of it."""
    while True:
        for name, replica in list(fleet.replicas.items()):
            with contextlib.suppress(UnreachedError, BrokenError, ConfigError):  # what was learnt so far stays
                status, page = await upstream.fetch(name, _PATH, within_s=_TIMEOUT_S)
                if status == 200:
                    told = told_by(page)
                    is_measured = told.tokens_per_s is not None
                    fleet.tell(name, told.over(replica.load.speeds), is_measured=is_measured)
        await asyncio.sleep(interval_s)


@dataclass(frozen=True, slots=True)
class Told:
    """Figures of one page of metrics, for all its engines together.

    tokens_per_s: of prompts; None: not measured yet. tiers: those measured. cache_tokens: capacity; 0: unknown.
    is_blending: an engine reuses text that is no prefix.
    """

    tokens_per_s: float | None = None
    tiers: Mapping[Medium, TierSpeed] = field(default_factory=dict)
    cache_tokens: int = 0
    is_blending: bool = False

    def over(self, speeds: Speeds) -> Speeds:
        """`speeds`, replaced where this page has a figure."""
        return dataclasses.replace(
            speeds,
            tokens_per_s=self.tokens_per_s or speeds.tokens_per_s,
            tiers={**speeds.tiers, **self.tiers},
            cache_tokens=self.cache_tokens or speeds.cache_tokens,
            is_blending=self.is_blending,
        )


def told_by(page: bytes) -> Told:
    """The figures of a page, without those that are impossible.

    Tiers report bytes, and `hotspan_cache_token_bytes` the bytes per token. What RAM or disk keeps was in the GPU's
    pool before: the largest of the three is the capacity.
    """
    sums, largest = figures(page.decode(errors="replace"), _WANTED)
    token_bytes = largest.get((TOKEN_BYTES, ""), math.inf)
    keeps = [sums.get((CAPACITY, tier), 0.0) / token_bytes for tier in ("ram", "disk")]
    tiers = {}
    for tier, medium in _TIERS.items():
        rate = sums.get(("hotspan_cost_bytes_per_second", tier), 0.0) / token_bytes
        if 0 < rate < math.inf:
            tiers[medium] = TierSpeed(rate, largest.get(("hotspan_cost_latency_seconds", tier), 0.0))
    rate = sums.get(("hotspan_cost_prefill_tokens_per_second", ""), 0.0)
    keeps_tokens = max(*keeps, sums.get((POOL, ""), 0.0))
    return Told(
        tokens_per_s=rate if 0 < rate < math.inf else None,
        tiers=tiers,
        cache_tokens=int(keeps_tokens) if keeps_tokens < math.inf else 0,
        is_blending=("hotspan_blend_up", "") in sums,
    )
