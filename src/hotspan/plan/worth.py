"""Whether tiers help a working set at all, what prefill costs with and without them, and when they are paid back."""

from dataclasses import dataclass
from typing import Final

from hotspan.core.types import Tier
from hotspan.plan.advice import Advice, Holding

LITTLE: Final = 0.05
"""Share of the prefill time: tiers that save less do not help."""

_WORDS: Final = {True: "helps", None: "may help", False: "will not help you"}
_RATES: Final = {Tier.RAM: "--ram-rate", Tier.DISK: "--disk-rate", Tier.L2: "--l2-rate"}
_HOURS_PER_MONTH: Final = 730


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether tiers help, and why.

    helps: None if rates or the engine's pool are unknown, and with them whether time is saved.
    saved: share of the prefill time that is saved; None if rates are unknown.
    """

    helps: bool | None
    why: str
    saved: float | None

    @property
    def word(self) -> str:
        return _WORDS[self.helps]

    def __str__(self) -> str:
        return f"This {self.word}: {self.why}"


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
    if (problem := _hopeless(advice, reuse)) is not None:
        return Verdict(False, problem, 0.0)
    saved, found = saved_share(advice, reuse), reuse * sum(held.hit_rate for held in _below(advice))
    what = f"of the prompt tokens {'were' if advice.is_measured else 'are'} found "
    what += "below the engine's pool" if advice.is_pool_known else "in the tiers"
    if (found if saved is None else saved) < LITTLE:
        little = f"{found:.1%} {what}" if saved is None else f"{saved:.1%} of the prefill time is saved"
        return Verdict(
            False, f"only {little}. Add memory or disk, or route returning users to the same replica.", saved
        )
    why = f"{found:.0%} {what}"
    if saved is None:
        return Verdict(None, f"{why}; the time saved is unknown without {missing_options(advice)}.", None)
    if not advice.is_pool_known:
        some = f"up to {saved:.0%} of the prefill time: the engine's own pool, which is unknown, may hold some of it."
        return Verdict(None, f"{why}, which saves {some}", saved)
    return Verdict(True, f"{why}, which saves {saved:.0%} of the prefill time.", saved)


def _hopeless(advice: Advice, reuse: float) -> str | None:
    """Why nothing at all is saved, if that is so."""
    below, pool = _below(advice), advice.pool
    if not reuse:
        return "no text is asked for twice, so nothing can be found again."
    if not below:
        return "there is no room for a tier."
    if not advice.text_bytes and not advice.is_measured:
        return f"a text of {advice.tokens} tokens is shorter than one chunk: nothing of it is kept."
    if pool is not None and pool.hit_rate >= 1 and not advice.is_measured:
        asked = advice.users * advice.tokens
        why = f"the engine's own pool ({pool.tokens:,} tokens) holds all {asked:,} tokens of the working set. "
        return f"{why}Only a restart, or a second replica, would find text in a disk or an L2."
    loads = [held for held in below if held.load_s is not None]
    if loads and not missing_options(advice) and not any(held.text_from for held in loads):
        return "loading a text takes as long as computing it, or longer."
    return None


def _below(advice: Advice) -> list[Holding]:
    """The tiers below the engine's pool."""
    return [held for held in advice.holdings if held.tier is not Tier.GPU]


def missing_options(advice: Advice) -> str:
    """The options that would make the saved time known, as a list in words; "" if it is known."""
    unknown = [_RATES[held.tier] for held in _below(advice) if held.hit_rate and held.load_s is None]
    missing = unknown if advice.compute_s else ["--prefill-rate", *unknown]
    if not missing:
        return ""
    *first, last = missing
    return f"{', '.join(first)} and {last}" if first else last


def saved_share(advice: Advice, reuse: float) -> float | None:
    """The share of the prefill time that loading saves, against the engine's own pool alone; None if unknown."""
    if advice.compute_s is None or missing_options(advice):
        return None
    computed = 1 - reuse * advice.pool_hit_rate
    gains = (held.hit_rate * max(0.0, 1 - (held.load_s or 0.0) / advice.compute_s) for held in _below(advice))
    return min(1.0, reuse * sum(gains) / computed) if computed > 0 else 0.0


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
    pool = advice.pool_hit_rate
    usd_per_token = usd_per_hour / 3600 * advice.compute_s / advice.tokens
    without = usd_per_token * (1 - reuse * pool)
    found = Cost(without * 1e6, without * (1 - saved) * 1e6)
    if requests_per_hour is None:
        return found
    engines = requests_per_hour * advice.compute_s * (1 - reuse * pool) / 3600
    per_month = engines * saved * usd_per_hour * _HOURS_PER_MONTH
    days = extra_usd / per_month * _HOURS_PER_MONTH / 24 if per_month and extra_usd else None
    return Cost(found.without, found.with_tiers, engines, engines * (1 - saved), per_month, days)
