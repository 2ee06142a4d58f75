"""One replica over an L2 that others share, and over a disk of its own if it has one: a cache, an engine that believes
nothing, and bytes that say their epoch.

Whoever asks for an invalidation ends an epoch of the chunks that it takes, and what is computed in the next has other
bytes. A request that a replica admits after it has read the invalidation, or after it was acknowledged to have made it,
must never be given bytes of an epoch before.
"""

import random
import uuid
from collections.abc import Callable

from hotspan.cache.choice import Text as Prompt
from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import PATIENCE_S, TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core.clock import Clock
from hotspan.core.directives import parse_directives
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Lookup, Tier
from hotspan.l2.base import ObjectStore
from hotspan.l2.follower import LogFollower
from hotspan.l2.node import NodeStore
from hotspan.l2.position import PositionKeeper, read_position
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.lower import SettledTier
from proofs.disk import NAMESPACE, SimulatedDisk
from proofs.engine import Broken, Text
from proofs.epochs import Asked, Copies, Epochs, Held, Loads, ReadLog, log_of
from proofs.world import content

SIZE = 3 * PAGE_BYTES
"""Of which a compressed chunk takes two."""

SLOWEST_S = 1.0
"""For which an engine computes one chunk, at most."""

COPIED = {"no_store": True, "renew": False}
"""Directives of a router's shadow copy, as router/answers.py adds them."""

Connect = Callable[[Clock], ObjectStore]
"""One more connection to the store that all replicas share, which has a log."""


class Replica:
    """One process after the other: RAM over its disk, if it has one, and the L2, and an engine that believes nothing.

    tiers:   below RAM, fastest first; the last is `tier`, the L2's.
    is_slow: copies to the engine take their time (`end_load`), in which their slots must not change.
    """

    def __init__(
        self,
        name: str,
        connect: Connect,
        clock: SimulatedClock,
        epochs: Epochs,
        rng: random.Random,
        *,
        is_sealed: bool,
        disk: SimulatedDisk | None = None,
        is_slow: bool = False,
    ) -> None:
        self.name = name
        self.disk = disk
        self.is_slow = is_slow
        self.least = dict.fromkeys(epochs.latest, 0)  # of epochs, for requests that are admitted now
        self.present = dict.fromkeys(epochs.latest, 0)  # of what they compute
        self.hits = self.disk_hits = self.l2_hits = self.stores = self.cuts = self.withdrawn = self.announced = (
            self.copied
        ) = 0
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
        self.loads: list[Loads] = []
        self._lost: list[Copies] = []
        self.queues = InlineQueues(self._rng.getrandbits(32))
        self._stirs, self._turned = 0, False
        clock = self._clock
        self._log = ReadLog(log_of(self._connected()), self._epochs, f"{self.name}/{self._lives}")
        since = read_position(self.disk.directory) if self.disk is not None else None
        self.follower = LogFollower(self._log, f"{self.name}/{self._lives}", clock, since=since)
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

        self.tiers: list[LowerTier] = self._open_disk()
        lanes = {Tier.L2: 2}
        self.tier = SettledTier(opened, clock)
        self.tiers.append(self.tier)
        if self.disk is not None:
            lanes[Tier.DISK] = 3
        cost = CostModel(2048, lanes, clock) if may_decide and self._rng.random() < 0.5 else None
        self.cache = TieredCache(self._slab, *self.tiers, namespace=NAMESPACE, cost=cost, clock=clock)

    def stop(self) -> None:
        """The process ends as it should: it writes what waits, as far as that goes, and lets go of its tiers."""
        for _ in range(4):
            self.queues.run()
            self.cache.step()
        for tier in self.tiers:
            tier.close(0.0)
        self.follower.close()

    def close(self) -> None:
        """All is over. Raises: Broken if a descriptor is left open."""
        for tier in self.tiers:
            tier.close(1.0)
        if self.disk is not None and (left := len(self.disk.files.open_fds)):
            raise Broken(f"{self.name}: {left} descriptors are left open")
        self.abandon()

    def abandon(self) -> None:
        """Let go of everything, whatever state it is in."""
        self._hang_up()
        if self.disk is not None:
            self.disk.crash()
        self._slab.close()

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is on its way, nothing is held, and the tiers take part."""
        is_idle = not self.asked and not self.copies and not self.cache.is_moving and not self.cache.ram.is_pinned
        return is_idle and all(tier.is_up for tier in self.tiers)

    # -- what an engine does -----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Forget what others invalidated, before anything is admitted."""
        if self.follower.position is None:
            return
        scopes, position = self.follower.foreign(), self.follower.position
        keeper = self._keeper if self.follower.is_shared else None
        done = keeper.follow(position, bool(scopes)) if keeper is not None and position is not None else _ignored
        if scopes:
            self._withdrawals.note(scopes, self._clock.monotonic())
            self.cache.invalidate(scopes, done, is_foreign=True)
            self._disown()
            self._stirs += 1
            if Scope() in scopes:
                # The log was lost: all that was ever invalidated is forgotten with everything else.
                self.present = dict(self._epochs.latest)
        for tier in self.tiers:
            tier.trust()
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

    def copy(self, copied: Held) -> None:
        """A router sends the copy of a request that it has held: its text is from before, whatever was invalidated.

        Nobody says since when it is held. What keeps its text out of the cache is its directives.
        """
        self.copied += any(epoch < self.present[key] for key, epoch in copied.present.items())
        self.arrive(copied.text, copied, is_copy=True)

    def arrive(self, text: Text, held: Held | None = None, *, is_copy: bool = False) -> None:
        """A request is admitted, and looks its text up.

        held: its text is from before. is_copy: it is a shadow copy, whose directives say what it stores.
        """
        self.follow()
        self.step()
        terms = Terms(tenant=text.tenant, labels=text.labels)
        reader = Reader(terms=terms, bare_terms=Terms(tenant=text.tenant))
        may_store = not (is_copy and parse_directives(COPIED).no_store)
        asked = Asked(text, reader, dict(self.least), dict(self.present), may_store=may_store)
        if held is not None:
            asked.present = held.present
        if held is not None and not is_copy:
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
            self._check_wait(asked)
            return
        for chunk in asked.text.chunks:
            answer = self.cache.lookup(chunk, asked.reader)
            if answer is Lookup.RETRY:
                self._check_wait(asked)
                return
            if answer is Lookup.MISS:
                break
            hits.append(chunk)
        self.asked.remove(asked)
        self.cuts += asked.reader.cut
        promoted = [asked.reader.promoted.get(chunk.key) for chunk in hits]
        self.disk_hits += promoted.count(Tier.DISK)
        self.l2_hits += promoted.count(Tier.L2)
        self.hits += len(hits)
        self.cache.join(asked.text.chunks, asked.reader)
        slots = self.cache.begin_load([chunk.key for chunk in hits], asked.reader)
        loads = Loads([(chunk, slot, bytes(self._slab.slot(slot))) for chunk, slot in zip(hits, slots, strict=True)])
        for chunk, _, data in loads.parts:
            self._check(chunk.key, data, asked.least[chunk.key])
        self.loads.append(loads)
        if not self.is_slow:
            self.end_load()
        self.cache.release(asked.reader)
        self.step()
        if asked.may_store:
            placements = self.cache.begin_store(asked.text.chunks[len(hits) :], asked.reader)
            if placements:
                parts = [(placement.chunk.index, placement.slot) for placement in placements]
                self.copies.append(Copies(parts, asked.text, asked.present))

    def end_load(self) -> None:
        """The engine has its copies, for which the slots kept their bytes. Raises: Broken."""
        if not self.loads:
            return
        loads = self.loads.pop(self._rng.randrange(len(self.loads)) if self.is_slow else 0)
        if any(bytes(self._slab.slot(slot)) != data for _, slot, data in loads.parts):
            raise Broken(f"{self.name}: a slot changed while the engine copied from it")
        self.cache.end_load([chunk.key for chunk, _, _ in loads.parts])

    def end_store(self) -> None:
        """The engine's copies are complete, or failed."""
        if not self.copies:
            return
        copies = self.copies.pop(self._rng.randrange(len(self.copies)))
        chunks = self._copy(copies)
        self.stores += len(chunks)
        self._stirs += 1
        if self.cache.cost is not None:
            self.cache.cost.observe_step(256 * len(chunks), 0, len(chunks) * self._rng.choice((1e-4, 0.01, SLOWEST_S)))
        self.cache.end_store(chunks, success=self._rng.random() < 0.9)

    def invalidate(self, scope: Scope, taken: set[ChunkKey], epoch: int) -> None:
        """An owner takes something back here; it binds this replica once it is acknowledged."""

        def durable(done: bool) -> None:
            if done:
                self._bind(epoch, taken)

        self._withdrawals.note([scope], self._clock.monotonic())
        self._disown()
        self._stirs += 1
        for key in taken:
            self.present[key] = epoch
        self.cache.invalidate([scope], durable)

    def evict(self) -> None:
        """RAM gives something up that nobody uses."""
        idle = [entry for entry in self.cache.ram.entries.values() if not entry.pins and not entry.is_used]
        if idle:
            self.cache._forget(self._rng.choice(idle))
            self._stirs += 1

    def clear(self) -> None:
        """The engine resets its prefix cache, and forgets its copies in flight, which go on until `end_clear`."""
        self.cache.clear()
        self._lost += self.copies
        self.copies.clear()
        self.loads.clear()
        self._stirs += 1

    def end_clear(self) -> None:
        """What was in flight at a reset has been written into its slots, which were nobody else's."""
        for copies in self._lost:
            self._copy(copies)
        self._lost.clear()
        self.cache.end_clear()

    def turn(self, most: int = 1 << 30) -> None:
        """I/O ends, as often as that."""
        self._turned |= self.queues.run(most) > 0

    def step(self) -> None:
        """The cache takes note of what ended."""
        trips = sum(tier.trips for tier in self.tiers)
        self.cache.step()
        if self._turned or sum(tier.trips for tier in self.tiers) != trips:
            self._turned, self._stirs = False, self._stirs + 1

    def check(self) -> None:
        """Raise Broken if the books do not agree."""
        try:
            self.cache.check()
        except AssertionError as error:
            raise Broken(f"{self.name}: {error}") from error

    # -- inside ------------------------------------------------------------------------------------------------------

    def _open_disk(self) -> list[LowerTier]:
        """A new process's disk tier, if it has a disk, and what remembers how far the log was followed."""
        disk, queues = self.disk, self.queues
        self._keeper: PositionKeeper | None = None
        if disk is None:
            return []
        disk.begin()
        writes = queues.queue("disk-position", 1, PAGE_BYTES)

        def submit(job: Callable[[], object]) -> None:
            def written(scratch: memoryview) -> None:
                job()

            writes.submit(written, _dropped, urgent=False)

        self._keeper = PositionKeeper(disk.directory, submit)
        tier = SettledTier(lambda again: disk.open(queues, again), self._clock)
        tier.distrust()  # until the log was read
        return [tier]

    def _copy(self, copies: Copies) -> list[Chunk]:
        """The engine's bytes come to their slots; the chunks that they are of."""
        chunks = [copies.text.chunks[index] for index, _ in copies.parts]
        for chunk, (_, slot) in zip(chunks, copies.parts, strict=True):
            self._slab.slot(slot)[:] = content(chunk.key, SIZE, copies.epochs[chunk.key])
        return chunks

    def _check_wait(self, asked: Asked) -> None:
        """A request has to wait: raise Broken if it does so for too long while nothing happens to what it waits for.

        What happens in between is another wait, which begins when the request is looked up again.
        """
        now_s = self._clock.monotonic()
        if asked.stirs != self._stirs:
            asked.stirs, asked.since_s = self._stirs, now_s
        waited_s = now_s - asked.since_s
        most_s = PATIENCE_S if self.cache.cost is None else PATIENCE_S + 2 * SLOWEST_S * len(asked.text.chunks)
        if waited_s > most_s + 1e-6:
            raise Broken(f"{self.name}: a request waits since {waited_s:.3f} s while nothing lands")

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


def _ignored(done: bool) -> None:
    """Nobody asked whether it is durable."""


def _dropped() -> None:
    """The process ends before it is written."""
