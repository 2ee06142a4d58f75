"""A plan and what it does, as tables on the terminal."""

import math

from rich.console import Console
from rich.table import Table

from hotspan.core.types import GIB
from hotspan.plan.advice import Advice
from hotspan.plan.tiers import TierPlan


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
