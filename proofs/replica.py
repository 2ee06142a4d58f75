"""One replica over an L2 that others share: a cache, an engine that believes nothing, and bytes that say their epoch.

Whoever asks for an invalidation ends an epoch of the chunks that it takes, and what is computed in the next has other
bytes. A request that a replica admits after it has read the invalidation, or after it was acknowledged to have made it,
must never be given bytes of an epoch before.
"""

import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hotspan.cache.choice import Text as Prompt
from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.clock import Clock
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey, Lookup, Tier
from hotspan.l2.base import LogPage, ObjectStore, SharedLog
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import content
from hotspan.tiers.slab import SharedSlab
from proofs.engine import Broken, Text
from proofs.simulated.inline import InlineQueues
from proofs.simulated.keys import FixedKeys
from proofs.simulated.lower import SettledTier
from proofs.world import NAMESPACE

SIZE = 3 * PAGE_BYTES
"""Of which a compressed chunk takes two."""

Connect = Callable[[Clock], ObjectStore]
"""One more connection to the store that all replicas share, which has a log."""


@dataclass(slots=True)
class Epochs:
    """What is known outside: how often each chunk was taken, and by which invalidation."""

    latest: dict[ChunkKey, int]
    taken: dict[int, tuple[int, set[ChunkKey]]] = field(default_factory=dict)  # by the scope's id
    scopes: list[Scope] = field(default_factory=list)  # kept, so that ids stay theirs


@dataclass(slots=True, eq=False)
class Asked:
    """A request that was admitted and not scheduled yet.

    least: the epochs of its chunks that it may be given. present: those of the bytes that it computes.
    """

    text: Text
    reader: Reader
    least: dict[ChunkKey, int]
    present: dict[ChunkKey, int]
    may_store: bool = True


@dataclass(slots=True, eq=False)
class Copies:
    """Chunks that the engine is about to have copied into their slots."""

    parts: list[tuple[int, int]]  # index in the text, slot
    text: Text
    epochs: dict[ChunkKey, int]


class Replica:
    """One process: RAM over the L2, and an engine that believes nothing."""

    def __init__(
        self, name: str, connect: Connect, clock: Clock, epochs: Epochs, rng: random.Random, *, is_sealed: bool
    ) -> None:
        self.name = name
        self.least = dict.fromkeys(epochs.latest, 0)  # of epochs, for requests that are admitted now
        self.present = dict.fromkeys(epochs.latest, 0)  # of what they compute
        self.hits = self.l2_hits = self.stores = self.cuts = 0
        self._connect = connect
        self._clock = clock
        self._stores: list[ObjectStore] = []  # of this life
        self._epochs = epochs
        self._rng = rng
        self._is_sealed = is_sealed
        self._lives = 0
        self._slab = SharedSlab(f"proof-{uuid.uuid4().hex}", rng.randint(5, 9), SIZE)
        self._slab.unlink()
        self.start()

    def start(self, *, may_decide: bool = True) -> None:
        """A process begins, with nothing in RAM; of the one before nothing is left.

        may_decide: by chance a cost model says what is loaded; without one it is all there is.
        """
        self._hang_up()
        self._lives += 1
        self.asked: list[Asked] = []
        self.copies: list[Copies] = []
        self.queues = InlineQueues(self._rng.getrandbits(32))
        clock = self._clock
        self._log = _ReadLog(_log_of(self._connected()))
        self.follower = LogFollower(self._log, f"{self.name}/{self._lives}", clock)
        writer = self._rng.getrandbits(60)

        def opened(again: bool) -> RemoteTier:
            keys = FixedKeys(writer + again, seed=7) if self._is_sealed else None
            options = RemoteOptions(
                self._connected(),
                self.follower,
                threads=2,
                store_depth=3,
                keys=keys,
                compress="always" if self._lives % 2 else "never",
                queue=self.queues.queue,
            )
            return RemoteTier(options, NAMESPACE, SIZE, clock)

        self.tier = SettledTier(opened, clock)
        cost = CostModel(2048, {Tier.L2: 2}, clock) if may_decide and self._rng.random() < 0.5 else None
        self.cache = TieredCache(self._slab, self.tier, namespace=NAMESPACE, cost=cost, clock=clock)

    def close(self) -> None:
        """All is over."""
        self.tier.close(1.0)
        self.abandon()

    def abandon(self) -> None:
        """Let go of everything, whatever state it is in."""
        self._hang_up()
        self._slab.close()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is on its way, nothing is held, and the tier takes part."""
        is_idle = not self.asked and not self.copies and not self.cache.is_moving and not self.cache.ram.is_pinned
        return is_idle and self.tier.is_up

    # -- what an engine does -----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Forget what others invalidated, before anything is admitted."""
        for scope in self.follower.foreign():
            self.cache.invalidate([scope], lambda done: None, is_foreign=True)
            self._disown()
            if id(scope) not in self._epochs.taken:
                # The log was lost: all that was ever invalidated is forgotten with everything else.
                self.present = dict(self._epochs.latest)
        for scope in self._log.take():
            if id(scope) in self._epochs.taken:
                self._bind(*self._epochs.taken[id(scope)])

    def arrive(self, text: Text) -> None:
        """A request is admitted, and looks its text up."""
        self.follow()
        self.cache.step()
        reader = Reader(terms=Terms(tenant=text.tenant, labels=text.labels))
        asked = Asked(text, reader, dict(self.least), dict(self.present))
        self.cache.ask(text.chunks, reader)
        self.asked.append(asked)
        self.look(asked)

    def look(self, asked: Asked) -> None:
        """One pass over a text; it is scheduled unless it has to wait."""
        hits = []
        prompt = Prompt(len(asked.text.chunks) * 256 + 1, 256)
        if self.cache.cost is not None and not self.cache.choose([asked.text.chunks], asked.reader, prompt):
            return
        for chunk in asked.text.chunks:
            answer = self.cache.lookup(chunk, asked.reader)
            if answer is Lookup.RETRY:
                return
            if answer is Lookup.MISS:
                break
            hits.append(chunk)
        self.asked.remove(asked)
        self.cuts += asked.reader.cut
        self.l2_hits += sum(chunk.key in asked.reader.promoted for chunk in hits)
        self.hits += len(hits)
        self.cache.join(asked.text.chunks, asked.reader)
        slots = self.cache.begin_load([chunk.key for chunk in hits], asked.reader)
        for chunk, slot in zip(hits, slots, strict=True):
            self._check(chunk.key, bytes(self._slab.slot(slot)), asked.least[chunk.key])
        self.cache.end_load([chunk.key for chunk in hits])
        self.cache.release(asked.reader)
        if asked.may_store:
            placements = self.cache.begin_store(asked.text.chunks[len(hits) :], asked.reader)
            if placements:
                parts = [(placement.chunk.index, placement.slot) for placement in placements]
                self.copies.append(Copies(parts, asked.text, asked.present))

    def end_store(self) -> None:
        """The engine's copies are complete, or failed."""
        if not self.copies:
            return
        copies = self.copies.pop(self._rng.randrange(len(self.copies)))
        chunks = [copies.text.chunks[index] for index, _ in copies.parts]
        for chunk, (_, slot) in zip(chunks, copies.parts, strict=True):
            self._slab.slot(slot)[:] = content(chunk.key, SIZE, copies.epochs[chunk.key])
        self.stores += len(chunks)
        if self.cache.cost is not None:
            self.cache.cost.observe_step(256 * len(chunks), 0, len(chunks) * self._rng.choice((1e-4, 0.01, 1.0)))
        self.cache.end_store(chunks, success=self._rng.random() < 0.9)

    def invalidate(self, scope: Scope, taken: set[ChunkKey], epoch: int) -> None:
        """An owner takes something back here; it binds this replica once it is acknowledged."""

        def durable(done: bool) -> None:
            if done:
                self._bind(epoch, taken)

        self._disown()
        for key in taken:
            self.present[key] = epoch
        self.cache.invalidate([scope], durable)

    def evict(self) -> None:
        """RAM gives something up that nobody uses."""
        idle = [entry for entry in self.cache.ram.entries.values() if not entry.pins and not entry.is_used]
        if idle:
            self.cache._forget(self._rng.choice(idle))

    def check(self) -> None:
        """Raise Broken if the books do not agree."""
        try:
            self.cache.check()
        except AssertionError as error:
            raise Broken(f"{self.name}: {error}") from error

    # -- inside ------------------------------------------------------------------------------------------------------

    def _connected(self) -> ObjectStore:
        self._stores.append(self._connect(self._clock))
        return self._stores[-1]

    def _hang_up(self) -> None:
        for store in self._stores:
            store.close()
        self._stores.clear()

    def _bind(self, epoch: int, taken: set[ChunkKey]) -> None:
        for key in taken:
            self.least[key] = max(self.least[key], epoch)
            self.present[key] = max(self.present[key], epoch)

    def _disown(self) -> None:
        for asked in self.asked:
            asked.may_store = False

    def _check(self, key: ChunkKey, data: bytes, least: int) -> None:
        for epoch in range(self._epochs.latest[key], -1, -1):
            if data == content(key, SIZE, epoch):
                if epoch < least:
                    raise Broken(f"{self.name}: a chunk of epoch {epoch} is a hit, and {least} is the least it may be")
                return
        raise Broken(f"{self.name}: a hit has wrong bytes")


class _ReadLog:
    """A shared log that says which invalidations were read from it.

    Of several that say the same the follower hands on one; a request that comes later is bound by all of them.
    """

    def __init__(self, log: SharedLog) -> None:
        self._log = log
        self._scopes: list[Scope] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def read(self, after: int) -> LogPage:
        """A page of the log."""
        page = self._log.read(after)
        self._scopes += (scope for entry in page.entries for scope in entry.scopes)
        return page

    def take(self) -> list[Scope]:
        """What was read since the last call."""
        scopes, self._scopes = self._scopes, []
        return scopes


def _log_of(store: ObjectStore) -> SharedLog:
    if store.log is None:
        raise ValueError("replicas share a store that has a log")
    return store.log
