"""The worker's half on CPU: copies blocks between the engine's KV cache and the slab, on a thread of its own.

Which of the jobs that wait is next: engine/copies.py.
"""

import logging
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    OffloadingWorker,
    TransferResult,
)

from hotspan.core.errors import EngineError
from hotspan.core.threads import start
from hotspan.engine.copies import Copy, CopyQueue, Place, places
from hotspan.engine.gaps import Gaps, tensor_places
from hotspan.tiers.slab import SharedSlab

logger = logging.getLogger(__name__)

_PIECE_BYTES = 32 << 20
"""What is copied before the next job is chosen: a few milliseconds, beside which the choice takes no time."""

Bytes = np.ndarray[Any, np.dtype[np.int8]]


@dataclass(frozen=True, slots=True)
class _Stack:
    """Tensors of one group that lie evenly spaced in the engine and in a slot, so that one copy moves a block of all.

    Each copy takes and gives back the GIL, and another thread may keep it for 5 ms: few large copies, not many small.
    Shape: engine int8[tensors, num_blocks, page]; slots int8[slots, tensors, blocks_per_chunk, page].
    """

    engine: Bytes
    slots: Bytes
    block_bytes: int


class HostWorker(OffloadingWorker):
    """vLLM's offloading worker where the engine's KV cache is in host memory.

    Whole pages are copied, as opaque bytes; the copies release the GIL. Both sides are memory, so a copy that fails is
    a bug: `get_finished` raises then, which stops the engine before half of a copy is a hit or part of an answer.
    """

    def __init__(
        self,
        kv_caches: CanonicalKVCaches,
        slab: SharedSlab,
        blocks_per_chunk: int,
        offset: int,
        *,
        stores: bool = True,
    ) -> None:
        """stores: False where another rank stores the same bytes: stores end as they are submitted."""
        self._slab = slab
        self._stores = stores
        self._offset = offset
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = _stacks(kv_caches, slab, blocks_per_chunk, offset)
        self._gaps: Gaps | None = Gaps(kv_caches, slab, blocks_per_chunk, offset)
        self._queue = CopyQueue(max(blocks_per_chunk, _PIECE_BYTES // _block_bytes(self._groups)))
        self._pending: set[int] = set()
        self._failed: set[int] = set()
        self._loading = 0
        self._finished: list[TransferResult] = []
        self._wake = threading.Condition()
        self._closing = False
        self._thread = start("copy", self._run)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        if not self._stores:
            with self._wake:
                self._finished.append(TransferResult(job_id, True))
            return True
        return self._submit(Copy(job_id, True, list(places(src_spec, dst_spec, self._blocks_per_chunk))))

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **_: Any) -> bool:
        return self._submit(Copy(job_id, False, list(places(dst_spec, src_spec, self._blocks_per_chunk))))

    def get_finished(self) -> list[TransferResult]:
        """The jobs that ended since the last call. Raises: EngineError if one has failed, from then on."""
        with self._wake:
            if self._failed:
                failed = ", ".join(map(str, sorted(self._failed)))
                raise EngineError(
                    f"copies between the engine's KV cache and RAM failed (job {failed}; the log above says why): the "
                    "engine stops, since their bytes can't be trusted. Please report this"
                )
            finished, self._finished = self._finished, []
        return finished

    def slot(self, index: int) -> memoryview:
        """The part of a slot that is this worker's, up to the slot's end; no copy."""
        return self._slab.slot(index)[self._offset :]

    def await_loads(self, timeout_s: float) -> None:
        """Sleep until no load is in flight, at most `timeout_s`: for steps in which the engine computes nothing."""
        with self._wake:
            self._wake.wait_for(lambda: not self._loading, timeout_s)

    def wait(self, job_ids: set[int]) -> None:
        with self._wake:
            self._queue.hurry(job_ids)
            self._wake.wait_for(lambda: self._pending.isdisjoint(job_ids))

    def shutdown(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join()
        self._groups, self._gaps = [], None
        self._slab.close()

    def _submit(self, copy: Copy) -> bool:
        with self._wake:
            self._pending.add(copy.job_id)
            self._loading += not copy.is_store
            self._queue.add(copy)
            self._wake.notify_all()
        return True

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: len(self._queue) or self._closing)
                taken = self._queue.take()
                if taken is None:
                    return
            copy, piece = taken
            has_failed = not self._transfer(copy, piece)
            with self._wake:
                if self._queue.put_back(copy, has_failed=has_failed):
                    self._pending.discard(copy.job_id)
                    self._loading -= not copy.is_store
                    if has_failed:
                        self._failed.add(copy.job_id)
                    else:
                        self._finished.append(TransferResult(copy.job_id, True, copy.moved_bytes, copy.seconds))
                    self._wake.notify_all()

    def _transfer(self, copy: Copy, piece: list[Place]) -> bool:
        started = time.perf_counter()
        try:
            if copy.is_store and not copy.moved_bytes and self._gaps is not None:
                self._gaps.blank(copy.places)
            copy.moved_bytes += self._copy(copy, piece)
        except Exception:  # a bug; who waits for the job must not wait for ever
            logger.exception("copy_failed job=%d", copy.job_id)
            return False
        copy.seconds += time.perf_counter() - started
        return True

    def _copy(self, copy: Copy, piece: list[Place]) -> int:
        moved = 0
        for group, block, slot, nth in piece:
            for stack in self._groups[group]:
                in_engine, in_slot = stack.engine[:, block], stack.slots[slot, :, nth]
                if copy.is_store:
                    np.copyto(in_slot, in_engine)
                else:
                    np.copyto(in_engine, in_slot)
                moved += stack.block_bytes
        return moved


def _block_bytes(groups: list[list[_Stack]]) -> int:
    """What the largest block takes in a slot."""
    return max((sum(stack.block_bytes for stack in stacks) for stacks in groups), default=_PIECE_BYTES)


def _stacks(kv_caches: CanonicalKVCaches, slab: SharedSlab, blocks_per_chunk: int, offset: int) -> list[list[_Stack]]:
    """Each group's tensors as stacks. Tensors lie one after the other in a slot; aliased ones share a place."""
    starts = list(tensor_places(kv_caches, blocks_per_chunk, offset))
    memory = np.frombuffer(slab.view, np.int8)
    groups: list[list[_Stack]] = []
    for refs in kv_caches.group_data_refs:
        stacks: list[_Stack] = []
        todo = [(kv_caches.tensors[ref.tensor_idx], starts[ref.tensor_idx], ref.page_size_bytes) for ref in refs]
        while todo:
            count, step_engine, step_slot = _even_run(todo)
            (tensor, place, page), todo = todo[0], todo[count:]
            engine = tensor.tensor.numpy()
            blocks, row = engine.shape[0], engine.strides[0]
            stacks.append(
                _Stack(
                    as_strided(engine, (count, blocks, page), (step_engine, row, 1)),
                    as_strided(
                        memory[place:],
                        (slab.slots, count, blocks_per_chunk, page),
                        (slab.slot_bytes, step_slot, tensor.page_size_bytes, 1),
                    ),
                    count * page,
                )
            )
        groups.append(stacks)
    return groups


def _even_run(tensors: list[tuple[CanonicalKVCacheTensor, int, int]]) -> tuple[int, int, int]:
    """How many of the first tensors are evenly spaced and alike, and their spacing in the engine and in a slot."""

    def steps(n: int) -> tuple[int, int]:
        (before, at_before, _), (after, at_after, _) = tensors[n - 1], tensors[n]
        return after.tensor.data_ptr() - before.tensor.data_ptr(), at_after - at_before

    def alike(n: int) -> bool:
        (first, _, page), (other, _, other_page) = tensors[0], tensors[n]
        same_memory = first.tensor.untyped_storage().data_ptr() == other.tensor.untyped_storage().data_ptr()
        return same_memory and page == other_page and first.tensor.stride() == other.tensor.stride()

    if len(tensors) == 1 or not alike(1):
        return 1, 0, 0
    count = 2
    while count < len(tensors) and alike(count) and steps(count) == steps(1):
        count += 1
    return count, *steps(1)
