"""Speed and capacity of the replicas, read from their metrics every few seconds."""

import asyncio
import contextlib
import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from hotspan.core.errors import ConfigError
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.router.fleet import Fleet
from hotspan.router.load import TOLD_EVERY_S, Speeds, TierSpeed
from hotspan.router.types import Medium

_PATH = "/metrics"
_TIMEOUT_S = 2.0
_LINE = re.compile(
    r"^(hotspan_cost_prefill_tokens_per_second|hotspan_cost_latency_seconds|hotspan_cost_bytes_per_second"
    r"|hotspan_cache_capacity_bytes|hotspan_cache_token_bytes|hotspan_blend_up"
    r"|vllm:cache_config_info)(?:\{(.*)\})? (\S+)$",
    re.MULTILINE,
)
_TIER = re.compile(r'(?:^|,)tier="(\w+)"')
_POOL = re.compile(r'(?:^|,)kv_cache_size_tokens="(\d{1,15})"')
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
    sums: dict[tuple[str, str], float] = {}
    largest: dict[tuple[str, str], float] = {}
    for name, labels, figure in _LINE.findall(page.decode(errors="replace")):
        if name == "vllm:cache_config_info":
            found, tier = _POOL.search(labels), ""
            value = float(found[1]) if found else 0.0
        else:
            found = _TIER.search(labels)
            tier, value = found[1] if found else "", _number(figure)
        if value > 0:
            sums[name, tier] = sums.get((name, tier), 0.0) + value
            largest[name, tier] = max(largest.get((name, tier), 0.0), value)
    token_bytes = largest.get(("hotspan_cache_token_bytes", ""), math.inf)
    keeps = [sums.get(("hotspan_cache_capacity_bytes", tier), 0.0) / token_bytes for tier in ("ram", "disk")]
    tiers = {}
    for tier, medium in _TIERS.items():
        rate = sums.get(("hotspan_cost_bytes_per_second", tier), 0.0) / token_bytes
        if 0 < rate < math.inf:
            tiers[medium] = TierSpeed(rate, largest.get(("hotspan_cost_latency_seconds", tier), 0.0))
    rate = sums.get(("hotspan_cost_prefill_tokens_per_second", ""), 0.0)
    keeps_tokens = max(*keeps, sums.get(("vllm:cache_config_info", ""), 0.0))
    return Told(
        tokens_per_s=rate if 0 < rate < math.inf else None,
        tiers=tiers,
        cache_tokens=int(keeps_tokens) if keeps_tokens < math.inf else 0,
        is_blending=("hotspan_blend_up", "") in sums,
    )


def _number(text: str) -> float:
    """0 for what is none, or not finite."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) else 0.0
