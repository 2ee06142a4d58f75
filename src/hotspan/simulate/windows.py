"""What a simulated replica reuses of texts that are no prefix: windows of sections, as `--blend` keeps them.

    noted     a window is seen beyond what the prefix caches have, for the first time
    stored    it is seen so again, in a prompt that is computed and not blended
    reused    where that saves enough of the prompt's time (docs/blending.md)

Windows have the size of a trace's blocks, and are evicted from the tiers as blocks are that stand on nothing.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hotspan.core.trace import Request, Section
from hotspan.router.policy import BLEND_LEAST
from hotspan.router.types import Medium
from hotspan.simulate.caches import BlockCache
from hotspan.simulate.costs import Blend, Costs

_MIN_TOKENS = 512
"""Fewer tokens out of windows are not worth it (`--blend-min-tokens`)."""

_MAX_NOTED = 131_072


class Window(NamedTuple):
    """Tokens [start, stop) of a prompt, and their key in the tiers: negative, so that it is no block's."""

    key: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Blended:
    """One prompt. windows: that are reused. tokens: out of these. work_s: it takes, alone."""

    windows: list[Window]
    tokens: int
    work_s: float


class Windows:
    """Those of one replica.

    caches: the tiers by medium, which have windows beside blocks.
    """

    def __init__(self, blend: Blend, costs: Costs, caches: Mapping[Medium, BlockCache], window_tokens: int) -> None:
        self._blend = blend
        self._costs = costs
        self._caches = caches
        self._width = window_tokens
        self._noted: OrderedDict[int, None] = OrderedDict()

    def plan(self, request: Request, kept: int, found: int) -> Blended | None:
        """How a prompt is blended; None if that would not save enough.

        kept: tokens of its beginning that the pool has. found: those that the pool and the tiers have.
        """
        costs, blend, windows = self._costs, self._blend, list[Window]()
        tokens, loads, reused_s = 0, dict[Medium, int](), 0.0
        for window in self._of(request):
            medium = self._where(window)
            start, stop = max(window.start, kept), min(window.stop, request.tokens - 1)
            if medium is not None and stop > start:
                windows.append(window)
                tokens += stop - start
                loads[medium] = loads.get(medium, 0) + stop - start
                reused_s += costs.prefill_s(start, stop)
        if tokens < _MIN_TOKENS:
            return None
        behind_s = costs.prefill_s(kept, request.tokens)
        work_s = behind_s - reused_s * (1 - blend.recompute_ratio) + blend.probe_share * behind_s
        work_s += blend.move_share * tokens / costs.prefill_tokens_per_s
        work_s += sum(costs.loading_s(medium, count) for medium, count in loads.items())
        full_s = costs.prefill_s(found, request.tokens)
        return Blended(windows, tokens, work_s) if full_s - work_s >= BLEND_LEAST * full_s else None

    def use(self, windows: list[Window]) -> None:
        """They were reused: they are in all tiers now, as far as they fit."""
        for cache in self._caches.values():
            for window in windows:
                cache.use((window.key,))

    def learn(self, request: Request, found: int) -> None:
        """A prompt is computed behind its first `found` tokens: its windows are noted, or stored."""
        behind = [window for window in self._of(request) if window.start >= found]
        self.use([window for window in behind if window.key in self._noted and self._where(window) is None])
        for window in behind:
            self._noted[window.key] = None
            self._noted.move_to_end(window.key)
        while len(self._noted) > _MAX_NOTED:
            self._noted.popitem(last=False)

    def _where(self, window: Window) -> Medium | None:
        """The fastest tier that has it."""
        return next((medium for medium, cache in self._caches.items() if cache.prefix((window.key,), 0, 1)), None)

    def _of(self, request: Request) -> Iterator[Window]:
        """The windows of a prompt's sections; none of a section that is shorter than one. They do not overlap: in the
        engine the last one of a section does, and covers what is left of it.
        """
        for section in request.sections:
            if section.stop - section.start >= self._width:
                yield from self._within(section)

    def _within(self, section: Section) -> Iterator[Window]:
        for number, start in enumerate(range(section.start, section.stop, self._width)):
            key = -1 - (section.key << 24 | number)
            yield Window(key, start, min(start + self._width, section.stop))
