"""Which windows a prompt is blended with, and how long it waits for those that lie below RAM.

The engine's time for it with the windows in RAM, and with all that the tiers have, is predicted from the cost model's
speeds (`plan.py`). Which way costs all requests less, and how long this one may wait, the cost model decides as it has
about the prompt's chunks, within what that left of its bound (cache/decisions.py). Without one, a request waits
while what it saves is more than what it has waited.
"""

from dataclasses import dataclass

from hotspan.cache.choice import BOUND_S, BOUND_SHARE, RESERVE, Part, Text
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.config.settings import BlendSettings
from hotspan.core.clock import Clock
from hotspan.core.directives import BlendDirective
from hotspan.core.types import Chunk
from hotspan.engine.blend.index import Found
from hotspan.engine.blend.orders import Selection
from hotspan.engine.blend.plan import Pace, Refusal, SpanPlan, plan_spans
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.selectors import Selector
from hotspan.engine.blend.store import WindowStore
from hotspan.engine.blend.windows import Tokens
from hotspan.engine.requests import RequestRecord

_DEFAULT_MODE = Selector.FIRST_K
"""Of requests that ask for blending, and do not say how, where only these are blended."""


@dataclass(slots=True)
class Prompt:
    """What is planned for.

    windows:  in it, those noted for the first time among them.
    reader:   waits for windows, and holds them in RAM from the plan to the load.
    since_s:  when it was first looked at (monotonic).
    chosen:   what it would be with all that it waits for, once that is decided.
    """

    record: RequestRecord
    tokens: Tokens
    windows: list[Found]
    reader: Reader
    since_s: float
    chosen: SpanPlan | None = None


def selection(settings: BlendSettings, width: int, record: RequestRecord) -> Selection:
    """What chooses the tokens of a request that are computed again, and the share that it chooses."""
    asked = record.blend if isinstance(record.blend, BlendDirective) else BlendDirective()
    configured = _DEFAULT_MODE if settings.mode == "allowed" else settings.mode
    selector = Selector(asked.mode or configured)
    if selector is Selector.FIRST_K:
        return Selection(selector, settings.first_k / width)
    ratio = settings.recompute_ratio if asked.recompute_ratio is None else asked.recompute_ratio
    return Selection(selector, ratio, asked.check_layer or settings.check_layer)


class Planner:
    """One engine's. The scheduler's thread calls it.

    width: tokens of a window. pace: speeds as the self-test measured them; nothing is planned before.
    """

    def __init__(
        self,
        settings: BlendSettings,
        cache: TieredCache,
        store: WindowStore,
        width: int,
        block_tokens: int,
        clock: Clock,
    ) -> None:
        self.pace: Pace | None = None
        self._settings = settings
        self._cache = cache
        self._store = store
        self._width = width
        self._block_tokens = block_tokens
        self._clock = clock

    def plan(self, known: Prompt, names: int, kept: int, loaded: int, text: Text) -> SpanPlan | Refusal | None:
        """Plan with the windows that are in RAM, once those worth waiting for are there, or late; None until then.

        names: blocks of the prompt that have one. kept, loaded: exact tokens from the front, that the engine has, and
        behind them that the tiers have.
        """
        waited_s = self._clock.monotonic() - known.since_s
        if known.chosen is None:
            if self._is_asking(known, kept, text, waited_s):
                return None
            chosen = self._choice(known, names, kept, loaded, text)
            if isinstance(chosen, Refusal):
                return chosen
            known.chosen = chosen
        wanted = {reuse.window.key for reuse in known.chosen.reused}
        windows = [found for found in known.windows if found.window.key in wanted]
        there, are_others_coming = self._store.look_up(windows, known.reader)
        if are_others_coming and self._may_wait(known, kept, waited_s, len(there) / len(windows)):
            return None
        return self._planned(known, names, there, kept, loaded)

    def release(self, known: Prompt) -> None:
        """What a prompt waited for, or holds, it needs no more: it is planned anew, or not at all."""
        held_s = known.reader.held_s
        self._cache.release(known.reader)
        known.record.held_s += known.reader.held_s - held_s
        known.chosen = None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _is_asking(self, known: Prompt, kept: int, text: Text, waited_s: float) -> bool:
        """Whether a request waits for tiers to say which windows they have."""
        if self._cache.cost is None:
            return waited_s <= self._patience_s(known, kept) / 2 and self._store.is_asking(known.windows)
        parts = [_part(found, 0.0) for found in known.windows]
        text = self._cache.decisions.after(text, known.record, known.reader)
        return not self._cache.decisions.are_known(parts, known.reader, text)

    def _choice(self, known: Prompt, names: int, kept: int, loaded: int, text: Text) -> SpanPlan | Refusal:
        """What costs all requests least: with all windows that the tiers have, or with those in RAM, or neither."""
        there = [found for found in known.windows if self._store.is_there(found)]
        in_ram = [found for found in there if self._store.is_in_ram(found)]
        now = self._planned(known, names, in_ram, kept, loaded)
        if len(there) == len(in_ram):
            return now
        later = self._planned(known, names, there, kept, loaded)
        if isinstance(later, Refusal):
            return now if isinstance(now, SpanPlan) else later
        now_s = now.blended_s if isinstance(now, SpanPlan) else later.full_s
        if later.blended_s >= now_s:
            return now
        taken = self._taken(known, in_ram, later, now_s, text)
        chosen = self._planned(known, names, taken, kept, loaded) if len(taken) > len(in_ram) else now
        if isinstance(chosen, SpanPlan):
            return chosen
        return now if isinstance(now, SpanPlan) else Refusal.LITTLE_SAVED

    def _taken(self, known: Prompt, in_ram: list[Found], later: SpanPlan, now_s: float, text: Text) -> list[Found]:
        """The windows to blend with: those in RAM, and those below that are worth their load.

        later: with all that are anywhere. now_s: of the engine, without those below.
        """
        have, wanted = {found.window.key for found in in_ram}, {reuse.window.key for reuse in later.reused}
        below = [found for found in known.windows if found.window.key in wanted - have]
        if self._cache.cost is None or not below:
            return in_ram + below
        each_s = (now_s - later.blended_s) / len(below)
        parts = [_part(found, 0.0) for found in in_ram] + [_part(found, each_s) for found in below]
        decisions = self._cache.decisions
        text = decisions.after(text, known.record, known.reader)
        decisions.weigh(parts, known.reader, text, later.blended_s, is_more=False)
        refused = known.reader.plan.refused if known.reader.plan is not None else frozenset()
        return in_ram + [found for found in below if found.window.key not in refused]

    def _may_wait(self, known: Prompt, kept: int, waited_s: float, landed: float) -> bool:
        """Whether a request goes on to wait for windows. landed: the share of them that is there."""
        if self._cache.cost is not None or known.chosen is None:
            return True  # until its plan is late, and the look-up ends with it
        earned_s = RESERVE * (known.chosen.full_s - known.chosen.blended_s) * landed
        return waited_s <= self._patience_s(known, kept) + max(0.0, earned_s)

    def _planned(self, known: Prompt, names: int, found: list[Found], kept: int, loaded: int) -> SpanPlan | Refusal:
        """How to blend a prompt with these windows, or why not to."""
        chosen, pace = selection(self._settings, self._width, known.record), self._measured()
        planned = plan_spans(
            len(known.tokens),
            kept,
            found,
            pace,
            min(1.0, chosen.ratio),
            min_tokens=self._settings.min_tokens,
            loaded_tokens=loaded,
            fresh_passes=1 + (chosen.needs_probe and chosen.selector is Selector.QUERY),
            check_layer=chosen.check_layer if chosen.needs_probe else 0,
        )
        if isinstance(planned, SpanPlan) and planned.first_approximate // self._block_tokens >= names:
            return Refusal.FEW_TOKENS  # the block of the first approximate token has no name yet
        return planned

    def _measured(self) -> Pace:
        """The speeds: of computing as the cost model has learnt it, else as the self-test measured it."""
        assert self.pace is not None  # nothing is planned before
        rates = self._cache.cost.prefill_rates if self._cache.cost is not None else None
        return self.pace if rates is None else Pace(*rates, self.pace.move_s, self.pace.layers)

    def _patience_s(self, known: Prompt, kept: int) -> float:
        """Without a cost model: how long a request may wait for windows while none is there."""
        full_s = self._measured().compute_s([Run(kept, len(known.tokens))])
        return RESERVE * (BOUND_SHARE * full_s + BOUND_S)


def _part(found: Found, work_s: float) -> Part:
    return Part(Chunk(found.window.key, None), found.run.tokens, work_s)
