"""The worker's half: loads and rotates windows into a request's blocks, computes the rest in slices, stores windows."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotspan.core.errors import EngineError
from hotspan.engine.blend.forward import EngineForward, inference
from hotspan.engine.blend.orders import BlendJob, Checked, CheckJob, Orders, Report, Speed, StoreJob
from hotspan.engine.blend.probe import Probe
from hotspan.engine.blend.rotation import Rotation
from hotspan.engine.blend.runs import Run, joined, slices, token_count
from hotspan.engine.blend.windows import Tokens

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Blend:
    """A job, and what of it is left to compute; None before it is loaded. probe: until it knows what to select."""

    job: BlendJob
    left: list[Run] | None = None
    probe: Probe | None = None


@dataclass(slots=True)
class _Check:
    """A check, and what of it is left to compute."""

    job: CheckJob
    left: list[Run]


class BlendSteps:
    """Carries out the scheduler's orders, between two forwards of the engine. The worker's main thread calls it.

    Tensor-parallel workers carry out the same orders in the same steps, and fail together.

    slot:          the memory of a slot that is this worker's.
    window_tokens: of a window.

        slot: [ layer 0: token 0: K, V | token 1: K, V | ... ][ layer 1: ... ] ... [ zeros ]

    Keys are stored as they are at position 0, so that a window's name is that of its tokens, wherever it was computed.
    """

    def __init__(
        self,
        forward: EngineForward,
        rotations: list[Rotation],
        slot: Callable[[int], memoryview],
        window_tokens: int,
        speed: Speed,
    ) -> None:
        self._forward = forward
        self._rotations = rotations
        self._slot = slot
        self._shape = (len(forward.layers), window_tokens, *forward.token_shape)
        self._blends: dict[int, _Blend] = {}  # in the order in which they came
        self._said: dict[int, torch.Tensor] = {}  # log-probabilities of the first token, of blends to be checked
        self._checks: dict[int, _Check] = {}
        self._report = Report(speed=speed)
        self._finished: set[str] = set()
        self._failed: set[str] = set()

    def run(self, orders: Orders) -> None:
        """Carry out the orders of one step, whose own tokens are computed."""
        began_s = time.perf_counter()
        for store in orders.stores:
            self._store(store)
        for number in orders.cancelled:
            if number in self._blends:
                self._end(self._blends[number])
            elif number in self._checks:
                self._end_check(number, None)
            self._said.pop(number, None)
        for job in orders.blends:
            self._blends[job.number] = _Blend(job)
        budget = orders.budget
        for blend in list(self._blends.values()):
            if budget <= 0:
                break
            budget -= self._advance(blend, budget)
        for asked in orders.checks:
            self._checks[asked.number] = _Check(asked, [Run(0, len(asked.tokens))])
        for check in list(self._checks.values()):
            self._check(check, orders.check_budget)
        self._report.done, self._report.running = orders.number, [*self._blends, *self._checks]
        self._report.seconds += time.perf_counter() - began_s

    def take_report(self) -> Report:
        """What happened since the last call."""
        taken, self._report = self._report, Report()
        return taken

    def take_finished(self) -> set[str]:
        """Requests whose blends have ended since the last call, in whatever way."""
        taken, self._finished = self._finished, set()
        return taken

    def take_failed(self) -> set[str]:
        """Those of them that failed: nothing of what they claimed is computed."""
        taken, self._failed = self._failed, set()
        return taken

    def _advance(self, blend: _Blend, budget: int) -> int:
        """Compute up to `budget` tokens of a blend; returns how many."""
        try:
            if blend.left is None:
                self._load_everywhere(blend.job)
                blend.left = blend.job.computed
                if blend.job.selection is not None:
                    blend.probe = Probe(self._forward, blend.job, blend.job.selection)
            if blend.probe is not None:
                return self._select(blend, blend.probe, budget)
            if not blend.left:
                self._end(blend)
                return 0
            batch = next(slices(blend.left, budget))
            hidden = self._forward.compute(blend.job.tokens, blend.job.blocks, batch)
            if self._forward.is_any(not bool(hidden.isfinite().all())):
                raise ValueError("a forward gave numbers that are not finite")
            done = batch[-1].stop
            blend.left = [Run(max(run.start, done), run.stop) for run in blend.left if run.stop > done]
            if blend.job.is_checked and not blend.left:
                self._said[blend.job.number] = self._first_token(blend.job.tokens, blend.job.blocks)
        except Exception:  # whatever it is, the request is computed as any other
            logger.exception("blend_failed request=%s: it is computed in full", blend.job.request_id)
            self._report.failed.append(blend.job.number)
            self._failed.add(blend.job.request_id)
            self._end(blend)
            return budget
        if not blend.left:
            self._end(blend)
        return token_count(batch)

    def _select(self, blend: _Blend, probe: Probe, budget: int) -> int:
        """Compute up to `budget` tokens of what a selector has to know; what is then left is what it chose too."""
        done = probe.advance(budget)
        if probe.is_done:
            selected = probe.selected()
            self._report.selected[blend.job.number] = token_count(selected)
            blend.left, blend.probe = joined([*blend.job.computed, *selected]), None
        return done

    def _first_token(self, tokens: Tokens, blocks: list[int]) -> torch.Tensor:
        """Log-probabilities of the token behind a prompt of which all but the last one is computed."""
        last = self._forward.compute(tokens, blocks, [Run(len(tokens) - 1, len(tokens))])
        return self._forward.first_token(last[-1:])

    def _check(self, check: _Check, budget: int) -> None:
        """Compute up to `budget` tokens of a check, and compare when it is complete."""
        number = check.job.number
        try:
            batch = next(slices(check.left, budget))
            hidden = self._forward.compute(check.job.tokens, check.job.blocks, batch)
            check.left = [Run(batch[-1].stop, run.stop) for run in check.left if run.stop > batch[-1].stop]
            if not check.left:
                self._end_check(number, compared(self._forward.first_token(hidden[-1:]), self._said.pop(number)))
        except Exception:  # nobody waits for it
            logger.exception("blend_check_failed")
            self._end_check(number, None)

    def _end_check(self, number: int, checked: Checked | None) -> None:
        self._checks.pop(number, None)
        self._said.pop(number, None)
        self._report.checked[number] = checked

    def _end(self, blend: _Blend) -> None:
        del self._blends[blend.job.number]
        self._report.ended.append(blend.job.number)
        self._finished.add(blend.job.request_id)

    def _load_everywhere(self, job: BlendJob) -> None:
        """Load a job's pieces in all workers. Raises: what failed here, or EngineError if it failed in another one."""
        error: Exception | None = None
        try:
            self._load(job)
        except Exception as failed:
            error = failed
        if self._forward.is_any(error is not None):
            raise error or EngineError("another worker could not load the windows")

    @inference
    def _load(self, job: BlendJob) -> None:
        """Load a job's pieces, except in layers before the check layer: its probe computes all tokens there."""
        computed = min(job.selection.check_layer, len(self._rotations) - 1) if job.selection is not None else 0
        for piece in job.pieces:
            window = self._window(piece.slot)[:, piece.skip : piece.skip + piece.run.tokens]
            for layer in range(computed, len(self._rotations)):
                keys = self._rotations[layer].moved(window[layer, :, 0], piece.shift)
                self._forward.write(job.blocks, piece.run, layer, keys, window[layer, :, 1])

    @inference
    def _store(self, store: StoreJob) -> None:
        try:
            blocks, window = self._forward.blocks_of(store.request_id), self._window(store.slot)
            run = Run(store.start, store.start + self._shape[1])
            for layer, rotation in enumerate(self._rotations):
                read = self._forward.read(blocks, run, layer)
                window[layer, :, 0] = rotation.moved(read[:, 0], -store.start)
                window[layer, :, 1] = read[:, 1]
            self._slot(store.slot)[window.nbytes :] = bytes(len(self._slot(store.slot)) - window.nbytes)
        except Exception:  # the window is not stored; the request has what it needs
            logger.exception("window_not_stored request=%s", store.request_id)
            self._report.unstored.append(store.key)
        else:
            self._report.stored.append(store.key)

    def _window(self, slot: int) -> torch.Tensor:
        """A slot's memory as a window. Shape: [layers, tokens, 2, KV heads, head size]."""
        count = 1
        for size in self._shape:
            count *= size
        return torch.frombuffer(self._slot(slot), dtype=self._forward.dtype, count=count).view(self._shape)


def compared(exact: torch.Tensor, blended: torch.Tensor) -> Checked:
    """What a blend made of a first token, by log-probabilities. Shape of each: float32[tokens of the vocabulary]."""
    kl = (exact.exp() * (exact - blended)).nan_to_num(0.0).sum()
    return Checked(bool(exact.argmax() == blended.argmax()), max(0.0, float(kl)))
