"""What a selector has to know of a prompt, from forwards that come before its blend: slices of them, between steps.

deviation   all that is claimed, up to the check layer, whose keys are compared with those that were loaded
query       the same; then what is fresh, and the question, through all layers: what the question attends to

K and V of the layers up to the check layer are exact from then on, and stay. Those of the first layer, 0, depend on
nothing before a token: computed anew they are what they were.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from hotspan.engine.blend.forward import EngineForward, inference
from hotspan.engine.blend.orders import BlendJob, Selection
from hotspan.engine.blend.plan import probe_share
from hotspan.engine.blend.runs import Run, as_positions, as_runs, joined, rows, slices, token_count
from hotspan.engine.blend.selectors import Selector, attention, deviations, highest

WIDTH = 16
"""Neighbours that are chosen together: a few long runs are computed faster than many single tokens."""

QUESTION_TOKENS = 64
"""So many tokens at the end of a prompt are its question, but at least `_LEAST_TOKENS` and none that is reused."""

_LEAST_TOKENS = 4


@dataclass(slots=True)
class Probe:
    """One job's. Not before its pieces are loaded.

    advance: computes up to so many tokens' worth. `selected` once it is done.
    """

    forward: EngineForward
    job: BlendJob
    selection: Selection
    _shallow: list[Run] = field(init=False)
    _deep: list[Run] = field(init=False)
    _question: Run = field(init=False)
    _deviating: torch.Tensor = field(init=False)
    _queries: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = field(init=False)

    def __post_init__(self) -> None:
        reused = [piece.run for piece in self.job.pieces]
        stop = len(self.job.tokens)
        if len(self.job.blocks) * self.forward.block_tokens < stop:
            stop -= 1  # the last token has no place yet
        claimed = joined([*self.job.computed, *reused])
        self._shallow = claimed
        self._question = question(claimed[0].start, reused[-1].stop, stop)
        is_deep = self.selection.selector is Selector.QUERY
        self._deep = joined([*self.job.computed, self._question]) if is_deep else []
        self._deviating = torch.zeros(len(self.job.tokens))
        self._queries = {}

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to compute."""
        return not self._shallow and not self._deep

    def advance(self, budget: int) -> int:
        """Compute up to `budget` tokens through all layers, or what takes as long. Returns how many that is."""
        if self._shallow:
            share = probe_share(self._layer, len(self.forward.layers))
            batch = next(slices(self._shallow, max(1, int(budget / share))))
            self._compare(batch)
            self._shallow = _behind(self._shallow, batch)
            return int(token_count(batch) * share)
        batch = next(slices(self._deep, budget))
        self._attend(batch)
        self._deep = _behind(self._deep, batch)
        return token_count(batch)

    @inference
    def selected(self) -> list[Run]:
        """The reused tokens to compute again."""
        reused = torch.from_numpy(as_positions([piece.run for piece in self.job.pieces]))
        own = self._attended() if self.selection.selector is Selector.QUERY else self._deviating
        scores = self.forward.total(own)[reused]  # over the heads of all workers, so that all choose the same
        chosen = highest(scores, reused, self.selection.ratio, width=WIDTH)
        in_question = reused[(reused >= self._question.start)]
        return as_runs([*chosen.tolist(), *in_question.tolist()])

    @property
    def _layer(self) -> int:
        """The check layer: the last one in a model that has fewer."""
        return min(self.selection.check_layer, len(self.forward.layers) - 1)

    @inference
    def _compare(self, batch: list[Run]) -> None:
        """Compute up to the check layer, and see how far its keys are from those that were loaded."""
        job, is_compared = self.job, self.selection.selector is Selector.DEVIATION
        loaded = [self.forward.read(job.blocks, run, self._layer)[:, 0] for run in batch if is_compared]
        keys = self.forward.compute_to(self._layer, job.tokens, job.blocks, batch)
        positions = torch.from_numpy(rows(batch).positions)
        for run, before in zip(batch if is_compared else (), loaded, strict=True):
            is_in = (positions >= run.start) & (positions < run.stop)
            self._deviating[run.start : run.stop] = deviations(before, keys[is_in]).cpu()

    @inference
    def _attend(self, batch: list[Run]) -> None:
        """Compute what is fresh, and keep the question's queries."""
        positions = torch.from_numpy(rows(batch).positions)
        is_asked = positions >= self._question.start
        for layer, queries in self.forward.queries_of(self.job.tokens, self.job.blocks, batch).items():
            if bool(is_asked.any()):
                self._queries.setdefault(layer, []).append((positions[is_asked], queries[is_asked]))

    def _attended(self) -> torch.Tensor:
        """What the question gives to each token, over all layers."""
        stop, total = self._question.stop, torch.zeros(len(self.job.tokens))
        for layer, taken in self._queries.items():
            positions, queries = (torch.cat(parts) for parts in zip(*taken, strict=True))
            impl: Any = self.forward.layers[layer].impl
            keys = self.forward.keys(self.job.blocks, stop, layer)
            given = attention(
                queries, positions.to(keys.device), keys, impl.scale, softcap=impl.logits_soft_cap or None
            )
            total[:stop] += given.cpu()
        return total


def question(start: int, reused_stop: int, stop: int) -> Run:
    """Where a prompt's question is: behind the last reused token, if that is enough."""
    first = max(start, stop - QUESTION_TOKENS, reused_stop)
    return Run(first if stop - first >= _LEAST_TOKENS else max(start, stop - QUESTION_TOKENS), stop)


def _behind(runs: list[Run], done: list[Run]) -> list[Run]:
    """What is left of runs, in order, behind a slice."""
    stop = done[-1].stop
    return [Run(max(run.start, stop), run.stop) for run in runs if run.stop > stop]
