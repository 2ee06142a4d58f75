"""What the garbage collector visits does not grow with the chunks of a cache: a full collection stops the engine."""

import gc
import uuid
from pathlib import Path

from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Terms
from hotspan.core.types import GIB, Chunk, Lookup
from hotspan.testing.chunks import chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.lower import steady

SIZE = 4096
TEXTS, LENGTH = 12, 16


def tracked() -> int:
    """How many objects a full collection visits."""
    for _ in range(2):
        gc.collect(0)  # which finds out that tuples of bytes need no visit
    return len(gc.get_objects())


def test_chunks_are_not_visited(tmp_path: Path) -> None:
    """Whether chunks were stored, used, written to disk, evicted, found by a new process or promoted; tagged ones, too.

    12 texts of 16 chunks: less than one object for ten chunks.
    """
    clock = SimulatedClock()
    queues = InlineQueues()
    slab = SharedSlab(f"test-{uuid.uuid4().hex}", TEXTS * LENGTH, SIZE)
    slab.unlink()
    options = DiskOptions(tmp_path / "disk", 4 * TEXTS * LENGTH * SIZE, queue=queues.queue, store_depth=GIB)
    texts = [chain(f"text {n}", LENGTH) for n in range(TEXTS)]

    def settle(cache: TieredCache) -> None:
        for _ in range(3):
            queues.run()
            cache.step()

    def store(cache: TieredCache, text: list[Chunk], reader: Reader) -> None:
        placements = cache.begin_store(text, reader)
        for placement in placements:
            slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE)
        cache.end_store(text)

    def load(cache: TieredCache, text: list[Chunk], reader: Reader) -> None:
        if Lookup.RETRY in [cache.lookup(chunk, reader) for chunk in text]:
            settle(cache)
        assert [cache.lookup(chunk, reader) for chunk in text] == [Lookup.HIT] * LENGTH
        keys = [chunk.key for chunk in text]
        cache.join(text, reader)
        cache.begin_load(keys, reader)
        cache.end_load(keys)

    def tagged(*labels: int) -> Reader:
        terms = Terms(tenant=7, labels=frozenset(labels))
        return Reader(terms=terms, bare_terms=terms)

    for turn in ("stored", "promoted"):
        cache = TieredCache(slab, steady(DiskTier(options, bytes(32), SIZE, clock), clock), clock=clock)
        begun = tracked()
        for n, text in enumerate(texts):
            if turn == "stored":
                store(cache, text, tagged(1, 2))
                settle(cache)
            load(cache, text, tagged(1, 3))
            if n == 3:  # what is there for a tenant, and not for a chunk, is there
                begun = tracked()
        settle(cache)
        cache.check()
        assert len(cache.ram.entries) == TEXTS * LENGTH == cache._lower.tiers[0].usage().chunks, turn
        assert (tracked() - begun) / ((TEXTS - 4) * LENGTH) < 0.1, turn
        cache._lower.tiers[0].close(5.0)
    slab.close()
