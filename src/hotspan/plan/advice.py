"""What the tiers hold, how often a working set would be found in them, and both as tables on the terminal."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hotspan.core.types import GIB, Tier
from hotspan.plan.shape import CHUNK_TOKENS, ModelShape
from hotspan.plan.tiers import TierPlan


@dataclass(frozen=True, slots=True)
class Holding:
    """What one tier holds.

    texts:    of the size asked for. hit_rate: of the working set, what this tier adds to the ones above it.
    load_s:   to bring one text to RAM, or from RAM to the engine; None where the rate is not known.
    """

    tier: Tier
    bytes: int
    tokens: int
    texts: int
    hit_rate: float
    load_s: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    """A working set of `users` texts of `tokens` tokens each, and what becomes of it.

    compute_s: to compute one text; None if nobody said how fast the engine is.
    """

    users: int
    tokens: int
    text_bytes: int
    holdings: tuple[Holding, ...]
    compute_s: float | None

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
) -> Advice:
    """What one worker's tiers do for `users` that come back with a text of `tokens` tokens.

    gb_s: rates of the tiers, as far as they are known.

    The disk has a copy of what is in RAM, so what it adds is what it is larger. Users that come round in a fixed order
    fare worse: then what is older than the tier is large is never found.
    """
    text_bytes = shape.text_bytes(tokens, CHUNK_TOKENS)
    sizes = {Tier.RAM: plan.ram_bytes, Tier.DISK: plan.disk.bytes if plan.disk is not None else 0}
    holdings, held, chunk = [], 0.0, shape.chunk_bytes(CHUNK_TOKENS)
    for tier, size in sizes.items():
        if not size:
            continue
        found = max(held, min(1.0, size / (users * text_bytes)) if text_bytes else 0.0)
        rate = (gb_s or {}).get(tier)
        load_s = shape.load_bytes(tokens) / rate / 1e9 if rate else None
        texts = size // text_bytes if text_bytes else 0
        holdings.append(Holding(tier, size, size // chunk * CHUNK_TOKENS, texts, found - held, load_s))
        held = found
    compute_s = tokens / prefill_tokens_per_s if prefill_tokens_per_s else None
    return Advice(users, tokens, text_bytes, tuple(holdings), compute_s)


def print_plan(plan: TierPlan) -> None:
    """What was chosen, and why, a line each."""
    table = Table(title="The tiers of one engine on this machine")
    for column in ("what", "how much", "why"):
        table.add_column(column, overflow="fold")
    for reason in plan.reasons:
        table.add_row(reason.what, reason.value, reason.why)
    Console().print(table)


def print_advice(advice: Advice) -> None:
    """What each tier holds of the working set, and what loading costs beside computing."""
    size = f"{advice.working_set_bytes / GIB:.1f} GiB of KV"
    table = Table(title=f"{advice.users:,} texts of {advice.tokens:,} tokens: {size}")
    for column in ("tier", "tokens", "texts", "hits", "to load one"):
        table.add_column(column, justify="left" if column == "tier" else "right")
    for held in advice.holdings:
        load = "-" if held.load_s is None else _time(held.load_s)
        table.add_row(held.tier.value, f"{held.tokens:,}", f"{held.texts:,}", f"{held.hit_rate:.0%}", load)
    compute = "" if advice.compute_s is None else _time(advice.compute_s)
    table.add_row("computed", "", "", f"{1 - advice.hit_rate:.0%}", compute)
    Console().print(table)


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{math.ceil(seconds * 1000)} ms"
