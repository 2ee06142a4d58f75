"""One replica over an L2 that others share: a cache, an engine that believes nothing, and bytes that say their epoch.

Whoever asks for an invalidation ends an epoch of the chunks that it takes, and what is computed in the next has other
bytes. A request that a replica admits after it has read the invalidation, or after it was acknowledged to have made it,
must never be given bytes of an epoch before.
"""

import random
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotspan.cache.choice import Text as Prompt
from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core.clock import Clock
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, ChunkKey, Lookup, Tier
from hotspan.l2.base import LogPage, ObjectStore, SharedLog
from hotspan.l2.follower import LogFollower
from hotspan.l2.node import ChosenLog, NodeStore
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.lower import SettledTier
from proofs.engine import Broken, Text
from proofs.world import NAMESPACE, content

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
    written: dict[tuple[str, int], list[tuple[int, set[ChunkKey]]]] = field(default_factory=dict)  # by place in a log
    read: int = 0  # entries from which a replica learnt what others took


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
class Held:
    """A text that a server holds for later: a warm-up's. since_s: from when on. present: epochs of its bytes."""

    text: Text
    since_s: float
    present: dict[ChunkKey, int]


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
        self.hits = self.l2_hits = self.stores = self.cuts = self.withdrawn = self.announced = 0
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
        self.held: list[Held] = []
        self._withdrawals = Withdrawals()
        self.copies: list[Copies] = []
        self.queues = InlineQueues(self._rng.getrandbits(32))
        clock = self._clock
        self._log = _ReadLog(_log_of(self._connected()), self._epochs, f"{self.name}/{self._lives}")
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
            self._withdrawals.note([scope], self._clock.monotonic())
            self.cache.invalidate([scope], lambda done: None, is_foreign=True)
            self._disown()
            if scope == Scope():
                # The log was lost: all that was ever invalidated is forgotten with everything else.
                self.present = dict(self._epochs.latest)
        for epoch, taken in self._log.take(self.follower.applied):
            self._epochs.read += 1
            self._bind(epoch, taken)

    def hold(self, text: Text) -> None:
        """The server is given a text that it sends later."""
        self.follow()
        self.held.append(Held(text, self._clock.monotonic(), dict(self.present)))

    def send(self) -> None:
        """A text that the server held goes to the engine, as it was."""
        if self.held:
            held = self.held.pop(self._rng.randrange(len(self.held)))
            self.arrive(held.text, held)

    def announce(self, text: Text) -> None:
        """A request is announced: what tiers have of its text is brought into RAM."""
        self.follow()
        self.announced += 1
        self.cache.prefetches.begin(text.chunks, text.tenant, self._rng.uniform(0.1, 20), lambda found: None)

    def arrive(self, text: Text, held: Held | None = None, *, is_copy: bool = False) -> None:
        """A request is admitted, and looks its text up.

        held: its text is from before. is_copy: it is a shadow copy, which stores nothing.
        """
        self.follow()
        self.cache.step()
        terms = Terms(tenant=text.tenant, labels=text.labels)
        reader = Reader(terms=terms, bare_terms=Terms(tenant=text.tenant))
        asked = Asked(text, reader, dict(self.least), dict(self.present), may_store=not is_copy)
        if held is not None:
            asked.present = held.present
            first = self._withdrawals.first_of(reader, text.chunks, NAMESPACE, held.since_s)
            asked.may_store = first is None
            self.withdrawn += first is not None
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

        self._withdrawals.note([scope], self._clock.monotonic())
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
        store = self._connect(self._clock)
        if isinstance(store, NodeStore):
            store.follows = lambda: self.follower.is_shared
        self._stores.append(store)
        return store

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
    """A shared log that says which invalidations were read from it, and knows those that were written by their place.

    An entry is written once its append has returned; what is read of another binds nobody.
    """

    def __init__(self, log: SharedLog, epochs: Epochs, owner: str) -> None:
        self._log = log
        self._owner = owner
        self._epochs = epochs
        self._read: list[tuple[str, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        """An entry, whose generation is noted with what it takes."""
        generation = self._log.append(scopes, by)
        known = [self._epochs.taken[id(scope)] for scope in scopes if id(scope) in self._epochs.taken]
        is_own = isinstance(self._log, ChosenLog) and not self._log.is_shared
        self._epochs.written.setdefault((self._owner if is_own else "", generation), []).extend(known)
        return generation

    def read(self, after: int) -> LogPage:
        """A page of the log."""
        page = self._log.read(after)
        owner = "" if page.is_shared else self._owner
        self._read += [(owner, entry.generation) for entry in page.entries]
        return page

    def take(self, applied: int) -> list[tuple[int, set[ChunkKey]]]:
        """What entries up to a generation took that were read since the last call."""
        ready = {place for place in self._read if place[1] <= applied}
        self._read = [place for place in self._read if place not in ready]
        return [one for place in sorted(ready) for one in self._epochs.written.get(place, ())]


def _log_of(store: ObjectStore) -> SharedLog:
    if store.log is None:
        raise ValueError("replicas share a store that has a log")
    return store.log
