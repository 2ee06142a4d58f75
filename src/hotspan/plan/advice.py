"""What the tiers hold, how often a working set would be found in them, and from how much text on each of them pays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hotspan.core.types import Tier
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import TierPlan

LATENCY_S: Final = {Tier.DISK: 0.001, Tier.L2: 0.005}
"""Before the first byte of a load, where it was not measured."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tier holds.

    bytes:     0 if unknown, with tokens and texts. texts: of the size asked for.
    hit_rate:  of the working set, what this tier adds to the ones above it.
    load_s:    to bring one text to RAM, or from RAM to the engine, without latency; None where the rate is not known.
    pays_from: tokens of repeated text from which this tier adds hits: what the tiers above it hold; None if unknown.
    text_from: tokens of the shortest text that loads faster than it is computed; None if none does, or if unknown.
    """

    tier: Tier
    bytes: int
    tokens: int
    texts: int
    hit_rate: float
    load_s: float | None
    pays_from: int | None = None
    text_from: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """A working set of `users` texts of `tokens` tokens each, and what becomes of it.

    compute_s:   to compute one text; None if the engine's rate is unknown.
    is_measured: the hit rates are those of a server so far, and not of this working set.
    """

    users: int
    tokens: int
    text_bytes: int
    holdings: tuple[Holding, ...]
    compute_s: float | None
    is_measured: bool = False

    @property
    def pool(self) -> Holding | None:
        """The engine's own pool; None if it is unknown."""
        return next((held for held in self.holdings if held.tier is Tier.GPU), None)

    @property
    def is_pool_known(self) -> bool:
        """Whether what the tiers add to the engine's own pool is known."""
        return self.pool is not None or self.is_measured

    @property
    def pool_hit_rate(self) -> float:
        """Of the engine's own pool; 0 if it is unknown."""
        return self.pool.hit_rate if self.pool is not None else 0.0

    @property
    def working_set_bytes(self) -> int:
        return self.users * self.text_bytes

    @property
    def hit_rate(self) -> float:
        """Of all tiers together, if every user is as likely to come back as any other."""
        return sum(holding.hit_rate for holding in self.holdings)


def advise(
    plan: TierPlan,
    shape: ModelShape,
    *,
    users: int,
    tokens: int,
    gb_s: Mapping[Tier, float] | None = None,
    prefill_tokens_per_s: float | None = None,
    pool_bytes: int = 0,
    l2_bytes: int = 0,
    latency_s: Mapping[Tier, float] = LATENCY_S,
    hits: Mapping[Tier, float] | None = None,
) -> Advice:
    """What one worker's tiers do for `users` that come back with a text of `tokens` tokens.

    gb_s:       rates of the tiers, as far as they are known. latency_s: before the first byte.
    pool_bytes: the engine's own pool; 0 if it is not known. l2_bytes: this worker's part of a shared store.
    hits:       hit rates that a server measured, by tier; None computes those of the working set.

    A tier has a copy of what is in those above it, so what it adds is what it is larger. Users that come round in a
    fixed order fare worse: then what is older than the tier is large is never found.
    """
    text_bytes, copies = shape.text_bytes(tokens), shape.copies
    disk_bytes = plan.disk.bytes if plan.disk is not None else 0
    sizes = {Tier.GPU: pool_bytes, Tier.RAM: plan.ram_bytes, Tier.DISK: disk_bytes, Tier.L2: l2_bytes}
    holdings, held = [], 0.0
    above = 0 if pool_bytes else None
    compute_s = tokens / prefill_tokens_per_s if prefill_tokens_per_s else None
    for tier, size in sizes.items():
        if not size and not (hits or {}).get(tier):
            continue
        # Each rank's pool has a copy, and each rank loads from RAM; the tiers below move one.
        kept, moved = copies if tier is Tier.GPU else 1, 1 if tier is Tier.RAM else copies
        found = max(held, min(1.0, size / (users * text_bytes * kept)) if text_bytes else 0.0)
        rate, latency = (gb_s or {}).get(tier), latency_s.get(tier, 0.0)
        load_s = shape.load_bytes(tokens) / moved / rate / 1e9 if rate else None
        texts = size // (text_bytes * kept) if text_bytes else 0
        holds = size // (shape.chunk_bytes * kept) * shape.chunk_tokens
        saved_s = (compute_s - load_s) / tokens if compute_s is not None and load_s is not None else 0.0
        text_from = max(shape.chunk_tokens, math.ceil(latency / saved_s)) if saved_s > 0 else None
        hit_rate = found - held if hits is None else hits.get(tier, 0.0)
        holdings.append(Holding(tier, size, holds, texts, hit_rate, load_s, above, text_from))
        held = found
        above = max(above or 0, holds) if above is not None or tier is not Tier.GPU else None
    return Advice(users, tokens, text_bytes, tuple(holdings), compute_s, hits is not None)


def print_plan(
    plan: TierPlan, console: Console | None = None, title: str = "Tiers of one engine on this machine"
) -> None:
    """What was chosen, and why, a line each. console: stdout's if None."""
    table = Table(title=Text(title), title_justify="left")
    for column in ("what", "how much", "why"):
        table.add_column(column, overflow="fold")
    for reason in plan.reasons:
        table.add_row(Text(reason.what), Text(reason.value), Text(reason.why))
    (console or Console()).print(table)
