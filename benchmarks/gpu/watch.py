"""What passes through the worker of the engine in this process: for digests, and for moving blocks by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
import torch
import xxhash
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult

from hotspan.engine.manager import HotspanManager
from hotspan.engine.spec import HotspanSpec


@dataclass
class Watch:
    """The worker of the engine in this process, and digests of what it moved, taken in the engine's own memory."""

    digests: bool
    worker: OffloadingWorker | None = None
    kv_caches: CanonicalKVCaches | None = None
    spec: HotspanSpec | None = None
    names: dict[int, bytes] = field(default_factory=dict)
    stored: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    compared: int = 0
    wrong: int = 0
    unknown: int = 0

    def attach(self, spec: HotspanSpec, kv_caches: CanonicalKVCaches, worker: OffloadingWorker) -> None:
        """Hear what this worker is asked and what it has done."""
        if self.worker is worker:
            return
        self.worker, self.kv_caches, self.spec = worker, kv_caches, spec
        if not self.digests:
            return
        submit_store, submit_load, get_finished = worker.submit_store, worker.submit_load, worker.get_finished
        loads: dict[int, list[tuple[int, int, tuple[bytes, int]]]] = {}

        def store(job_id: int, blocks: Any, slots: Any, **more: Any) -> bool:
            places = self._places(blocks, slots)
            for (_, _, name), digest in zip(places, self._digest(places), strict=True):
                self.stored[name] = digest
            return bool(submit_store(job_id, blocks, slots, **more))

        def load(job_id: int, slots: Any, blocks: Any, **more: Any) -> bool:
            loads[job_id] = self._places(blocks, slots)
            return bool(submit_load(job_id, slots, blocks, **more))

        def finished() -> list[TransferResult]:
            results = list(get_finished())
            for result in results:
                places = loads.pop(result.job_id, [])
                for (_, _, name), digest in zip(places, self._digest(places), strict=True):
                    self.compared += 1
                    self.unknown += name not in self.stored
                    self.wrong += self.stored.get(name, digest) != digest
            return results

        patched: Any = worker
        patched.submit_store, patched.submit_load, patched.get_finished = store, load, finished

    def _places(self, blocks: Any, slots: Any) -> list[tuple[int, int, tuple[bytes, int]]]:
        """(group, block, (chunk, place in it)) of a job: blocks come group by group, the first may lie in mid-chunk."""
        if self.spec is None:
            return []
        per_chunk, found = self.spec.blocks_per_chunk, []
        block_ids, slot_ids = blocks.block_ids.tolist(), slots.block_ids.tolist()
        block_at = slot_at = 0
        for group, size in enumerate(blocks.group_sizes):
            skipped = blocks.block_indices[group] % per_chunk if size else 0
            for n in range(size):
                slot = slot_ids[slot_at + (skipped + n) // per_chunk]
                found.append((group, block_ids[block_at + n], (self.names[slot], (skipped + n) % per_chunk)))
            block_at += size
            slot_at += -(-(skipped + size) // per_chunk) if size else 0
        return found

    def _digest(self, places: list[tuple[int, int, Any]]) -> list[bytes]:
        """xxh3 of each block's bytes over all tensors of its group, once the device has computed all it was given."""
        if self.kv_caches is None or not places:
            return []
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        hashes = [xxhash.xxh3_128() for _ in places]
        for group, refs in enumerate(self.kv_caches.group_data_refs):
            mine = [(n, block) for n, (of, block, _) in enumerate(places) if of == group]
            if not mine:
                continue
            for ref in refs:
                tensor = self.kv_caches.tensors[ref.tensor_idx].tensor
                at = torch.tensor([block for _, block in mine], device=tensor.device)
                pages = tensor.index_select(0, at)[:, : ref.page_size_bytes].cpu().numpy()
                for (n, _), page in zip(mine, pages, strict=True):
                    hashes[n].update(np.ascontiguousarray(page).tobytes())
        return [each.digest() for each in hashes]


@contextmanager
def watched(*, digests: bool) -> Iterator[Watch]:
    """Watch the worker of every engine that starts meanwhile in this process."""
    watch = Watch(digests)
    spec: Any = HotspanSpec
    manager: Any = HotspanManager
    before = spec.get_worker, manager.prepare_store, manager.prepare_load
    get_worker, prepare_store, prepare_load = before

    def worker(self: HotspanSpec, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        made: OffloadingWorker = get_worker(self, kv_caches)
        watch.attach(self, kv_caches, made)
        return made

    def named(self: HotspanManager, keys: Any, context: Any, slots: Any) -> None:
        for chunk, slot in zip(self._chunks(keys, context), slots.block_ids.tolist(), strict=True):
            watch.names[slot] = chunk.key

    @wraps(prepare_store)
    def store(self: HotspanManager, keys: Any, context: Any) -> Any:
        output = prepare_store(self, keys, context)
        named(self, output.keys_to_store, context, output.store_spec)
        return output

    @wraps(prepare_load)
    def load(self: HotspanManager, keys: Any, context: Any) -> Any:
        slots = prepare_load(self, keys, context)
        named(self, keys, context, slots)
        return slots

    spec.get_worker, manager.prepare_store, manager.prepare_load = worker, store, load
    try:
        yield watch
    finally:
        spec.get_worker, manager.prepare_store, manager.prepare_load = before
