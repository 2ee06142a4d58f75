"""A TieredCache over a real slab and a manual tier, with a simulated clock, and an engine that writes known bytes."""

import uuid
from collections.abc import Sequence
from types import TracebackType

from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import Placement, TieredCache
from hotspan.core.terms import Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.testing.chunks import content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.pace import Pace
from hotspan.tiers.shares import Shares
from hotspan.tiers.slab import SharedSlab
from kit.simulated.lower import steady
from tests.cache.manual import Flight, ManualTier

SIZE = 4096


class Rig:
    """What the tests turn: cache, tier, clock, slab."""

    def __init__(
        self,
        ram: int,
        disk: int = 0,
        store_depth: int = 32,
        shares: Shares | None = None,
        pace: Pace | None = None,
        step_tokens: int = 0,
    ) -> None:
        """step_tokens: of an engine with a cost model; 0: without one."""
        self.clock = SimulatedClock()
        cost = CostModel(step_tokens, {Tier.DISK: 1}, self.clock, ram) if step_tokens else None
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", ram, SIZE)
        self.slab.unlink()
        self.tier = ManualTier(disk, SIZE, store_depth=store_depth, clock=self.clock)
        self.lower = steady(self.tier, self.clock)
        lower = [self.lower] if disk else []
        self.cache = TieredCache(self.slab, *lower, shares=shares, clock=self.clock, pace=pace, cost=cost)

    def __enter__(self) -> "Rig":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.cache.check()
        self.slab.close()

    def begin(self, chunks: Sequence[Chunk], version: int = 0) -> list[Placement]:
        """Store up to the point where the bytes are in their slots and nobody knows."""
        placements = self.cache.begin_store(chunks)
        for placement in placements:
            self.slab.slot(placement.slot)[:] = content(placement.chunk.key, SIZE, version)
        return placements

    def store(self, chunks: Sequence[Chunk], version: int = 0) -> list[Chunk]:
        """Store chunks into RAM; returns those that found a place."""
        stored = [placement.chunk for placement in self.begin(chunks, version)]
        self.cache.end_store(stored)
        self.cache.check()
        return stored

    def put_below(self, chunks: Sequence[Chunk]) -> None:
        """Let the tier below hold chunks, as a former process left them."""
        for chunk in chunks:
            self.tier.put(chunk, Terms(), content(chunk.key, SIZE))

    def ask(self, chunks: Sequence[Chunk], reader: Reader) -> list[Lookup]:
        """Look a chain up as the engine does: in order, up to the first MISS."""
        answers: list[Lookup] = []
        for chunk in chunks:
            answers.append(self.cache.lookup(chunk, reader))
            if answers[-1] is Lookup.MISS:
                break
        self.cache.check()
        return answers

    def promote(self, chunks: Sequence[Chunk], reader: Reader) -> list[Lookup]:
        """Ask, let every transfer end well, and ask again."""
        self.ask(chunks, reader)
        self.land()
        return self.ask(chunks, reader)

    def land(self) -> None:
        """All transfers end well and are noted, those too that begin meanwhile."""
        self.land_some()
        while self.tier.flights:
            self.land_some()

    def land_some(self) -> None:
        """The transfers that are in flight now end well and are noted."""
        self.tier.finish_all()
        self.cache.step()
        self.cache.check()

    def in_ram(self, key: ChunkKey) -> bool:
        """Whether a stranger is told HIT (and lets go at once)."""
        reader = Reader(cut=True)
        answer = self.cache.lookup(Chunk(key, None), reader)
        self.cache.release(reader)
        return answer is Lookup.HIT

    def load(self, chunks: Sequence[Chunk], reader: Reader, version: int = 0) -> None:
        """Begin and end a load of chunks that were HIT; every byte must be right."""
        keys = [chunk.key for chunk in chunks]
        for key, slot in zip(keys, self.cache.begin_load(keys, reader), strict=True):
            assert self.slab.slot(slot) == content(key, SIZE, version)
        self.cache.end_load(keys)
        self.cache.check()

    @property
    def loads(self) -> list[Flight]:
        return [flight for flight in self.tier.flights if flight.is_load]

    @property
    def stores(self) -> list[Flight]:
        return [flight for flight in self.tier.flights if not flight.is_load]
