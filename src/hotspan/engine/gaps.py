"""Zeroes what a store leaves of its slots: they held other chunks, of other tenants, and reach the tiers as a whole."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, GPULoadStoreSpec

from hotspan.engine.copies import Place
from hotspan.tiers.slab import SharedSlab


class Gaps:
    """The bytes of a slot that a KV cache group has nothing for, and those of blocks that a store leaves out.

    Groups share slots of one size. A group with fewer layers, or smaller pages, does not fill its own; of a sliding
    window or a recurrent state only the last block of a chunk may be stored.

        2 blocks a chunk, the group has tensor 0 only:  [ tensor 0: block 0 | block 1 ][ tensor 1: gap ]
    """

    def __init__(self, kv_caches: CanonicalKVCaches, slab: SharedSlab, blocks_per_chunk: int, offset: int) -> None:
        self._slots = np.frombuffer(slab.view, np.int8)[: slab.slots * slab.slot_bytes].reshape(slab.slots, -1)
        starts = list(tensor_places(kv_caches, blocks_per_chunk, offset))

        def piece(ref: CanonicalKVCacheRef, nth: int) -> slice:
            start = starts[ref.tensor_idx] + nth * kv_caches.tensors[ref.tensor_idx].page_size_bytes
            return slice(start, start + ref.page_size_bytes)

        self._pieces = [
            [[piece(ref, nth) for ref in refs] for nth in range(blocks_per_chunk)] for refs in kv_caches.group_data_refs
        ]
        self._gaps = [list(_between(pieces, offset, starts[-1])) for pieces in self._pieces]

    def fills(self, stored: GPULoadStoreSpec) -> bool:
        """Whether a store of these blocks leaves nothing of its slots: whole chunks, of groups without gaps."""
        return all(
            not size or not (self._gaps[group] or size % len(pieces) or stored.block_indices[group] % len(pieces))
            for group, (size, pieces) in enumerate(zip(stored.group_sizes, self._pieces, strict=True))
        )

    def blank(self, places: Iterable[Place]) -> None:
        """Before a store of these blocks is copied. Mutates: their slots, but for what the store writes."""
        stored: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
        for group, _, slot, nth in places:
            stored[group, slot].add(nth)
        for (group, slot), blocks in stored.items():
            row, pieces = self._slots[slot], self._pieces[group]
            for gap in self._gaps[group]:
                row[gap] = 0
            for nth in set(range(len(pieces))) - blocks:
                for piece in pieces[nth]:
                    row[piece] = 0


def tensor_places(kv_caches: CanonicalKVCaches, blocks_per_chunk: int, offset: int) -> Iterator[int]:
    """Where each tensor begins in a slot, one after the other from `offset` on; at last, where the last one ends."""
    yield offset
    for tensor in kv_caches.tensors:
        offset += tensor.page_size_bytes * blocks_per_chunk
        yield offset


def _between(blocks: Iterable[Iterable[slice]], start: int, stop: int) -> Iterator[slice]:
    """What of [start, stop) none of these covers."""
    ends = sorted({(piece.start, piece.stop) for pieces in blocks for piece in pieces})
    for (_, before), (after, _) in pairwise([(start, start), *ends, (stop, stop)]):
        if before < after:
            yield slice(before, after)
