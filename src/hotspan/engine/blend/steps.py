"""The worker's half: loads and rotates windows into a request's blocks, computes the rest in slices, stores windows."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hotspan.engine.blend.forward import EngineForward, inference
from hotspan.engine.blend.orders import BlendJob, Orders, Report, Speed, StoreJob
from hotspan.engine.blend.rotation import Rotation
from hotspan.engine.blend.runs import Run, slices, token_count

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Blend:
    """A job, and what of it is left to compute; None before it is loaded."""

    job: BlendJob
    left: list[Run] | None = None


class BlendSteps:
    """Carries out the scheduler's orders, between two forwards of the engine. The worker's main thread calls it.

    slot:          the memory of a slot, for this worker's KV.
    window_tokens: of a window.

        slot: [ layer 0: token 0: K, V | token 1: K, V | ... ][ layer 1: ... ] ...
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
        for job in orders.blends:
            self._blends[job.number] = _Blend(job)
        budget = orders.budget
        for blend in list(self._blends.values()):
            if budget <= 0:
                break
            budget -= self._advance(blend, budget)
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
                self._load(blend.job)
                blend.left = blend.job.computed
            if not blend.left:
                self._end(blend)
                return 0
            batch = next(slices(blend.left, budget))
            hidden = self._forward.compute(blend.job.tokens, blend.job.blocks, batch)
            if not bool(hidden.isfinite().all()):
                raise ValueError("a forward gave numbers that are not finite")
            done = batch[-1].stop
            blend.left = [Run(max(run.start, done), run.stop) for run in blend.left if run.stop > done]
        except Exception:  # whatever it is, the request is computed as any other
            logger.exception("blend_failed request=%s: it is computed in full", blend.job.request_id)
            self._report.failed.append(blend.job.number)
            self._failed.add(blend.job.request_id)
            self._end(blend)
            return budget
        if not blend.left:
            self._end(blend)
        return token_count(batch)

    def _end(self, blend: _Blend) -> None:
        del self._blends[blend.job.number]
        self._report.ended.append(blend.job.number)
        self._finished.add(blend.job.request_id)

    @inference
    def _load(self, job: BlendJob) -> None:
        for piece in job.pieces:
            window = self._window(piece.slot)[:, piece.skip : piece.skip + piece.run.tokens]
            for layer, rotation in enumerate(self._rotations):
                keys = rotation.moved(window[layer, :, 0], piece.shift)
                self._forward.write(job.blocks, piece.run, layer, keys, window[layer, :, 1])

    @inference
    def _store(self, store: StoreJob) -> None:
        try:
            blocks, window = self._forward.blocks_of(store.request_id), self._window(store.slot)
            run = Run(store.start, store.start + self._shape[1])
            for layer in range(self._shape[0]):
                window[layer].copy_(self._forward.read(blocks, run, layer))
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
