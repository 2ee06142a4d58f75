"""Whether tiers help a working set at all, what prefill costs with and without them, and when they are paid back."""

from dataclasses import dataclass
from typing import Final

from hotspan.core.types import Tier
from hotspan.plan.advice import Advice

LITTLE: Final = 0.05
"""Share of the prefill time: tiers that save less do not help."""

_HOURS_PER_MONTH: Final = 730


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether tiers help, and why. saved: share of the prefill time that is saved; None where rates are unknown."""

    helps: bool
    why: str
    saved: float | None

    def __str__(self) -> str:
        return f"This {'helps' if self.helps else 'will not help you'}: {self.why}"


@dataclass(frozen=True, slots=True)
class Cost:
    """Prefill in USD per million prompt tokens, of one engine that does nothing else.

    engines, engines_with_tiers: that do nothing but prefill the requests that were given.
    saved_per_month: at these requests. payback_days: of what the tiers cost extra. None if unknown, or nothing.
    """

    without: float
    with_tiers: float
    engines: float | None = None
    engines_with_tiers: float | None = None
    saved_per_month: float | None = None
    payback_days: float | None = None


def judge(advice: Advice, reuse: float) -> Verdict:
    """What to tell somebody with this working set, of whose requests the share `reuse` asks for a text again."""
    by_tier = {held.tier: held for held in advice.holdings}
    below = [held for held in advice.holdings if held.tier is not Tier.GPU]
    saved = saved_share(advice, reuse)
    if not reuse:
        return Verdict(False, "no text is asked for twice, so nothing can be found again.", 0.0)
    if not below:
        return Verdict(False, "there is no room for a tier.", 0.0)
    if not advice.text_bytes:
        return Verdict(
            False, f"a text of {advice.tokens} tokens is shorter than one chunk: nothing of it is kept.", 0.0
        )
    pool = by_tier.get(Tier.GPU)
    if pool is not None and pool.hit_rate >= 1:
        asked = advice.users * advice.tokens
        why = f"the engine's own pool ({pool.tokens:,} tokens) holds all {asked:,} tokens of the working set. "
        return Verdict(False, f"{why}Only a restart, or a second replica, would find text in a disk or an L2.", 0.0)
    loads = [held for held in below if held.load_s is not None]
    if advice.compute_s is not None and loads and not any(held.text_from for held in loads):
        return Verdict(False, "loading a text takes as long as computing it, or longer.", 0.0)
    found = reuse * sum(held.hit_rate for held in below)
    if (found if saved is None else saved) < LITTLE:
        what = f"{found:.1%} of the tokens are found" if saved is None else f"{saved:.1%} of the prefill time is saved"
        return Verdict(False, f"only {what}. Add memory or disk, or route returning users to the same replica.", saved)
    why = f"{found:.0%} of the prompt tokens are found below the engine's pool"
    return Verdict(True, f"{why}." if saved is None else f"{why}, which saves {saved:.0%} of the prefill time.", saved)


def unknown_rates(advice: Advice) -> tuple[Tier, ...]:
    """Tiers in which something is found, and nobody knows how fast it is loaded."""
    below = (held for held in advice.holdings if held.tier is not Tier.GPU)
    return tuple(held.tier for held in below if held.hit_rate and held.load_s is None)


def saved_share(advice: Advice, reuse: float) -> float | None:
    """The share of the prefill time that loading saves, against the engine's own pool alone; None if unknown."""
    if advice.compute_s is None or unknown_rates(advice):
        return None
    pool = sum(held.hit_rate for held in advice.holdings if held.tier is Tier.GPU)
    computed = 1 - reuse * pool
    gains = (
        held.hit_rate * max(0.0, 1 - (held.load_s or 0.0) / advice.compute_s)
        for held in advice.holdings
        if held.tier is not Tier.GPU
    )
    return reuse * sum(gains) / computed if computed > 0 else 0.0


def cost(
    advice: Advice,
    reuse: float,
    usd_per_hour: float,
    *,
    requests_per_hour: float | None = None,
    extra_usd: float = 0.0,
) -> Cost | None:
    """What prefill costs on an engine of `usd_per_hour`; None if its rate, or a tier's, is unknown.

    extra_usd: once, for what the tiers need that is not there.
    """
    saved = saved_share(advice, reuse)
    if saved is None or advice.compute_s is None:
        return None
    pool = sum(held.hit_rate for held in advice.holdings if held.tier is Tier.GPU)
    usd_per_token = usd_per_hour / 3600 * advice.compute_s / advice.tokens
    without = usd_per_token * (1 - reuse * pool)
    found = Cost(without * 1e6, without * (1 - saved) * 1e6)
    if requests_per_hour is None:
        return found
    engines = requests_per_hour * advice.compute_s * (1 - reuse * pool) / 3600
    per_month = engines * saved * usd_per_hour * _HOURS_PER_MONTH
    days = extra_usd / per_month * _HOURS_PER_MONTH / 24 if per_month and extra_usd else None
    return Cost(found.without, found.with_tiers, engines, engines * (1 - saved), per_month, days)
