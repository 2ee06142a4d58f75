"""An engine that uses a cache as the real one does, writes bytes that it knows, and believes nothing it is told.

The model is a dict: to each chunk the epoch of its bytes. An invalidation begins a new epoch of all that it takes, so
that bytes from before it are told from those after; a hit with any other bytes than its epoch's breaks the promise.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hotspan.cache.choice import Text as Prompt
from hotspan.cache.entry import Entry, Reader, State
from hotspan.cache.tiered import PATIENCE_S, TieredCache
from hotspan.cache.withdrawals import Withdrawals
from hotspan.core.clock import Clock
from hotspan.core.terms import NEVER, Scope, Terms
from hotspan.core.types import Chunk, ChunkKey, Lookup, Tier
from hotspan.testing.chunks import chain
from proofs.disk import NAMESPACE
from proofs.world import JUNK, content

_CHUNK_TOKENS = 256


class Broken(Exception):
    """The cache broke a promise."""


@dataclass(frozen=True, slots=True)
class Text:
    """What requests ask for: a chain of chunks, whose it is, its tags, and its time to live (0: for ever)."""

    chunks: tuple[Chunk, ...]
    tenant: int
    labels: frozenset[int]
    ttl_s: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One that was not scheduled yet.

    waits:   what it was told RETRY of in its last pass; None where there was no room yet.
    since_s: since when it waits without a break.
    may_store: False for a copy of a request, and for a text that was invalidated while it was held.
    """

    text: Text
    reader: Reader
    waits: dict[ChunkKey, Entry | None] = field(default_factory=dict)
    since_s: float = 0.0
    may_store: bool = True

    def is_waiting(self, entries: Mapping[ChunkKey, Entry]) -> bool:
        """Whether all of that is still on its way: nothing it waits for has ended, well or not."""
        return bool(self.waits) and all(
            entry is None or (entries.get(key) is entry and entry.state is not State.READY)
            for key, entry in self.waits.items()
        )


@dataclass(slots=True, eq=False)
class Held:
    """A text that a server holds since a time, to send it later. is_taken: it was invalidated."""

    text: Text
    since_s: float
    is_taken: bool = False


@dataclass(slots=True, eq=False)
class Copies:
    """Copies between the engine and slots that have begun and not ended: (key, slot, bytes)."""

    parts: list[tuple[Chunk, int, bytes]]


@dataclass(slots=True, eq=False)
class Forgetting:
    """An invalidation that is not known to be durable: which epochs it ended."""

    number: int
    ended: dict[ChunkKey, int]


@dataclass(slots=True)
class Counts:
    """What happened, to show that a proof was not about nothing."""

    hits: int = 0
    disk_hits: int = 0
    stores: int = 0
    invalidations: int = 0
    acknowledged: int = 0
    retries: int = 0
    cuts: int = 0
    left_over_a_gap: int = 0
    sent: int = 0
    withdrawn: int = 0
    announced: int = 0


def texts(tenants: int, each: int = 3, length: int = 5, ttl_s: int = 40) -> list[Text]:
    """Texts of several tenants, some with a common beginning, some that expire."""
    made = []
    for tenant in range(1, tenants + 1):
        trunk = chain(f"tenant-{tenant}/trunk", length)
        for number in range(each):
            labels = frozenset({100 * tenant + number})
            if number == 1:
                branch = chain(f"tenant-{tenant}/branch", length - 1)
                chunks = trunk[:2] + [
                    Chunk(chunk.key, branch[n - 1].key if n else trunk[1].key, n + 2) for n, chunk in enumerate(branch)
                ]
            else:
                chunks = trunk if number == 0 else chain(f"tenant-{tenant}/{number}", 2 + number % length)
            made.append(Text(tuple(chunks), tenant, labels, ttl_s if number % 3 == 2 else 0))
    return made


@dataclass(slots=True)
class Engine:
    """Requests over one cache, and the model.

    below:    the chunks that the tier below has now, whole or not.
    epochs:   of each chunk's bytes. carried, expires: the terms of its present copies.
    unsure:   invalidations that were not acknowledged: a crash may undo them.
    """

    cache: TieredCache
    clock: Clock
    texts: Sequence[Text]
    rng: random.Random
    payload_bytes: int
    below: Callable[[], set[ChunkKey]]
    max_requests: int = 4
    patience_s: float = PATIENCE_S
    checks_books: bool = True
    requests: list[Request] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)
    withdrawals: Withdrawals = field(default_factory=Withdrawals)
    loads: list[Copies] = field(default_factory=list)
    stores: list[Copies] = field(default_factory=list)
    epochs: dict[ChunkKey, int] = field(default_factory=dict)
    carried: dict[ChunkKey, frozenset[int]] = field(default_factory=dict)
    expires: dict[ChunkKey, int] = field(default_factory=dict)
    unsure: list[Forgetting] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    landed_s: float = 0.0
    _landed: int = 0
    _epoch: int = 0
    _forgettings: int = 0
    _tenants: dict[ChunkKey, int] = field(default_factory=dict)
    _parents: dict[ChunkKey, ChunkKey | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for text in self.texts:
            for chunk in text.chunks:
                self.epochs[chunk.key] = 0
                self._tenants[chunk.key] = text.tenant
                self._parents[chunk.key] = chunk.parent

    def content(self, key: ChunkKey, epoch: int | None = None) -> bytes:
        """A chunk's bytes in an epoch; the present one by default."""
        return content(key, self.payload_bytes, self.epochs[key] if epoch is None else epoch)

    # -- requests ----------------------------------------------------------------------------------------------------

    def arrive(self, *, is_copy: bool = False) -> None:
        """A request comes and looks its text up. is_copy: it stores nothing."""
        if len(self.requests) < self.max_requests:
            self._admit(self.rng.choice(self.texts), may_store=not is_copy)

    def _admit(self, text: Text, held: Held | None = None, *, may_store: bool = True) -> None:
        expires_s = int(self.clock.unix()) + text.ttl_s if text.ttl_s else NEVER
        terms = Terms(tenant=text.tenant, labels=text.labels, expires_s=expires_s)
        reader = Reader(terms=terms, bare_terms=Terms(tenant=text.tenant, expires_s=expires_s))
        if held is not None:
            first = self.withdrawals.first_of(reader, text.chunks, NAMESPACE, held.since_s)
            self._expect(first is not None or not held.is_taken, "a held text was invalidated, and is stored")
            may_store = first is None
            self.counts.sent += 1
            self.counts.withdrawn += not may_store
        self.requests.append(Request(text, reader, may_store=may_store))
        self.ask(self.requests[-1])

    def hold(self) -> None:
        """A server is given a text that it sends later, as a warm-up does."""
        if len(self.held) < self.max_requests:
            self.held.append(Held(self.rng.choice(self.texts), self.clock.monotonic()))

    def send(self) -> None:
        """A text that is held comes as a request."""
        if self.held and len(self.requests) < self.max_requests:
            held = self.held.pop(self.rng.randrange(len(self.held)))
            self._admit(held.text, held)

    def announce(self) -> None:
        """A request is announced: what the tiers have of its text is brought into RAM."""
        text = self.rng.choice(self.texts)
        self.counts.announced += 1
        self.cache.prefetches.begin(text.chunks, text.tenant, self.rng.uniform(0.1, 20), lambda found: None)

    def ask_again(self) -> None:
        """A request that waits is looked up once more."""
        if self.requests:
            self.ask(self.rng.choice(self.requests))

    def give_up(self) -> None:
        """A request goes away."""
        if self.requests:
            request = self.requests.pop(self.rng.randrange(len(self.requests)))
            self.cache.release(request.reader)

    def ask(self, request: Request) -> None:
        """One pass over a request's text; it is scheduled unless it has to wait."""
        hits: list[ChunkKey] = []
        entries = self.cache.ram.entries
        if not request.is_waiting(entries):
            request.since_s = self.clock.monotonic()
        request.waits.clear()
        if not self._choose(request):
            request.waits[request.text.chunks[0].key] = None
            return
        for chunk in request.text.chunks:
            answer = self.cache.lookup(chunk, request.reader)
            if answer is Lookup.MISS:
                break
            if answer is Lookup.HIT:
                self._check_hit(chunk.key)
                hits.append(chunk.key)
            if answer is Lookup.RETRY:
                request.waits[chunk.key] = entries.get(chunk.key)
        self.counts.cuts += request.reader.cut
        if request.waits:
            self._check_patience(request)
            return
        self.requests.remove(request)
        self._schedule(request, hits)

    def _choose(self, request: Request) -> bool:
        """What the request is to load, if a cost model decides that; False while it has to wait for answers."""
        prompt = Prompt(len(request.text.chunks) * _CHUNK_TOKENS + 1, _CHUNK_TOKENS)
        return self.cache.cost is None or self.cache.choose([request.text.chunks], request.reader, prompt)

    def _compute(self, chunks: int) -> None:
        """The engine computes so many chunks, at a speed that nobody can rely on."""
        if self.cache.cost is not None and chunks:
            seconds = chunks * self.rng.choice((1e-4, 0.01, 1.0))
            self.cache.cost.observe_step(chunks * _CHUNK_TOKENS, 0, seconds)

    def _schedule(self, request: Request, hits: list[ChunkKey]) -> None:
        """Load the prefix that was hit, and store the rest, as it is computed."""
        text, reader = request.text, request.reader
        self.counts.hits += len(hits)
        self.counts.disk_hits += sum(key in reader.promoted for key in hits)
        for chunk in text.chunks:
            known = self.cache.terms(chunk.key)
            if known is not None:
                self._carry(chunk.key, reader.terms, fresh=False)
                reader.inherited[chunk.index] = reader.terms.joined(known)
        self.cache.join(text.chunks, reader)
        if hits:
            slots = self.cache.begin_load(hits, reader)
            chunks = text.chunks[: len(hits)]
            self.loads.append(Copies([(c, s, self.content(c.key)) for c, s in zip(chunks, slots, strict=True)]))
        else:
            self.cache.release(reader)
        rest = text.chunks[len(hits) :] if request.may_store else ()
        self._compute(len(rest))
        there = {chunk.key for chunk in rest if self.cache.terms(chunk.key) is not None}
        placements = self.cache.begin_store(rest, Reader(terms=reader.terms, inherited=reader.inherited))
        for placement in placements:
            self.cache.ram.slab.slot(placement.slot)[:] = JUNK * self.payload_bytes
            self._carry(placement.chunk.key, reader.terms, fresh=placement.chunk.key not in there)
        if placements:
            parts = [(one.chunk, one.slot, self.content(one.chunk.key)) for one in placements]
            self.stores.append(Copies(parts))

    def end_load(self) -> None:
        """The engine has its copies."""
        if self.loads:
            load = self.loads.pop(self.rng.randrange(len(self.loads)))
            for _, slot, data in load.parts:
                self._expect(self._has(slot, data), "a slot changed while the engine copied from it")
            self.cache.end_load([chunk.key for chunk, _, _ in load.parts])

    def end_store(self, success: bool | None = None) -> None:
        """The engine's copies are complete, or failed."""
        if not self.stores:
            return
        store = self.stores.pop(self.rng.randrange(len(self.stores)))
        success = self.rng.random() < 0.9 if success is None else success
        junk = JUNK * self.payload_bytes
        for _, slot, data in store.parts:
            view = self.cache.ram.slab.slot(slot)
            self._expect(bytes(view) == junk, "someone wrote into a slot that the engine copies into")
            if success:
                view[:] = data
        self.counts.stores += len(store.parts)
        self.cache.end_store([chunk for chunk, _, _ in store.parts], success=success)

    # -- forgetting --------------------------------------------------------------------------------------------------

    def invalidate(self) -> None:
        """An owner takes something back: a text by its tag, a chunk, a tenant, an adapter, or (seldom) everything."""
        text = self.rng.choice(self.texts)
        tag = frozenset({min(text.labels)})
        scopes = (
            Scope(labels=tag),
            Scope(tenant=text.tenant, labels=tag),
            Scope(keys=frozenset({self.rng.choice(text.chunks).key})),
            Scope(tenant=text.tenant),
            Scope(namespace=NAMESPACE, labels=tag),
            Scope(adapter=7),
            Scope(),
        )
        self.forget(self.rng.choices(scopes, (8, 4, 8, 2, 2, 1, 1))[0])

    def forget(self, scope: Scope) -> None:
        """Invalidate, and hold the cache to it."""
        taken = {
            key
            for key, tenant in self._tenants.items()
            if scope.takes(key, NAMESPACE, Terms(tenant=tenant, labels=self.carried.get(key, frozenset())))
        }
        taken |= self._fallen(taken | (scope.keys or frozenset()))
        self.withdrawals.note([scope], self.clock.monotonic())
        for held in self.held:
            own = Terms(tenant=held.text.tenant, labels=held.text.labels)
            held.is_taken |= any(scope.takes(chunk.key, NAMESPACE, own) for chunk in held.text.chunks)
        self._forgettings += 1
        forgetting = Forgetting(self._forgettings, {key: self.epochs[key] for key in taken})
        self.unsure.append(forgetting)
        self.counts.invalidations += 1

        def durable(done: bool) -> None:
            if done:
                self._acknowledge(forgetting)

        self._epoch += 1
        for key in taken:
            self.epochs[key] = self._epoch
            self.carried.pop(key, None)
            self.expires.pop(key, None)
        self.cache.invalidate([scope], durable)
        for key in taken:
            self._expect(self.cache.terms(key) is None, "it was invalidated and is here")

    def _fallen(self, taken: set[ChunkKey]) -> set[ChunkKey]:
        """What stands on these in every tier where it is: a link over a chunk that the tier has not is not known there.

        What falls in one tier and not in another may stay, and is counted.
        """
        tiers = [set(self.cache.ram.entries), self.below()]
        fallen = [self._descendants(taken, here) for here in tiers]
        anywhere = self._descendants(taken, set(self.epochs)) & (tiers[0] | tiers[1])
        found = {
            key
            for key in anywhere
            if all(key not in here or key in down for here, down in zip(tiers, fallen, strict=True))
        }
        self.counts.left_over_a_gap += len(anywhere - found - taken)
        return found

    def _descendants(self, taken: set[ChunkKey], here: set[ChunkKey]) -> set[ChunkKey]:
        found: set[ChunkKey] = set()
        for key, parent in self._parents.items():  # parents come before their children
            if key in here and parent is not None and (parent in taken or parent in found):
                found.add(key)
        return found

    def _acknowledge(self, forgetting: Forgetting) -> None:
        self.counts.acknowledged += 1
        self.unsure.remove(forgetting)
        for older in self.unsure:
            if older.number < forgetting.number:
                for key in forgetting.ended:
                    older.ended.pop(key, None)

    # -- what always holds -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """The cache takes note of what ended."""
        self.cache.step()
        self.note_landings()

    def note_landings(self) -> None:
        """Remember when anything last came to RAM."""
        stats = self.cache.stats
        landed = sum(stats.load_bytes.values()) + stats.store_bytes[Tier.RAM]
        if landed != self._landed:
            self._landed, self.landed_s = landed, self.clock.monotonic()

    def check(self) -> None:
        """Raise Broken if something does not hold that always does."""
        self.note_landings()
        if not self.checks_books:
            return
        try:
            self.cache.check()
        except AssertionError as error:
            raise Broken(str(error)) from error
        for load in self.loads:
            for _, slot, data in load.parts:
                self._expect(self._has(slot, data), "a slot changed while the engine copied from it")

    def _has(self, slot: int, data: bytes) -> bool:
        return bytes(self.cache.ram.slab.slot(slot)) == data  # a memoryview compares one byte after the other

    def found(self, key: ChunkKey, data: bytes, terms: Terms) -> None:
        """After a crash the tier below holds these bytes: they are the present epoch's, or one's that was not gone.

        Joins that were not written yet are gone, as are the requests that they came from.
        """
        older = [forgetting.ended[key] for forgetting in self.unsure if key in forgetting.ended]
        for epoch in (self.epochs[key], *older):
            if data == self.content(key, epoch):
                self.epochs[key] = epoch
                break
        else:
            was = any(data == self.content(key, epoch) for epoch in range(self._epoch + 1))
            raise Broken("what was invalidated is back" if was else "wrong bytes")
        self.carried[key], self.expires[key] = terms.labels, terms.expires_s

    def begin_anew(self, cache: TieredCache) -> None:
        """The process died: nothing of its requests and copies is left."""
        self.cache = cache
        self.requests.clear()
        self.held.clear()
        self.withdrawals = Withdrawals()
        self.loads.clear()
        self.stores.clear()
        self.carried.clear()
        self.expires.clear()
        self._landed = 0

    def end(self, wait: Callable[[], object]) -> None:
        """Let everybody go; raise Broken if a pin or a slot is left over. wait: lets I/O in flight end."""
        for request in self.requests:
            self.cache.release(request.reader)
        self.requests.clear()
        while self.loads:
            self.end_load()
        while self.stores:
            self.end_store(success=False)
        for _ in range(1000):
            wait()
            self.cache.step()
            if not self.cache.is_moving and not self.cache.is_persisting and not self.cache.ram.is_pinned:
                break  # what was announced is held for a while
        self.check()
        self._expect(not self.cache.is_moving, "a promotion never ended")
        self._expect(not self.cache.is_persisting, "a store never ended")
        self._expect(not self.cache.ram.is_pinned, "a pin is left over")
        used = self.cache.usage()[Tier.RAM].chunks
        self._expect(used == len(self.cache.ram.entries), "a slot is left over")

    # -- inside ------------------------------------------------------------------------------------------------------

    def _carry(self, key: ChunkKey, terms: Terms, *, fresh: bool) -> None:
        if fresh:
            self.carried[key], self.expires[key] = terms.labels, terms.expires_s
            return
        self.carried[key] = self.carried.get(key, frozenset()) | terms.labels
        expiries = [at for at in (self.expires.get(key, NEVER), terms.expires_s) if at]
        self.expires[key] = min(expiries, default=NEVER)

    def _check_hit(self, key: ChunkKey) -> None:
        entry = self.cache.ram.entries[key]
        data = bytes(self.cache.ram.slab.slot(entry.slot))  # as in `_has`
        if data != self.content(key):
            was = any(data == self.content(key, epoch) for epoch in range(self._epoch + 1))
            raise Broken("what was invalidated is a hit" if was else "a hit has wrong bytes")
        expires_s = self.expires.get(key, NEVER)
        self._expect(not expires_s or self.clock.unix() < expires_s, "a hit is past its time")

    def _check_patience(self, request: Request) -> None:
        self.counts.retries += 1
        if request.reader.plan is not None:  # how long it may wait then: tests/cache/test_cost.py
            return
        waited = self.clock.monotonic() - max(request.since_s, self.landed_s)
        self._expect(waited <= self.patience_s + 1e-6, f"a request waits since {waited:.3f} s while nothing lands")

    def _expect(self, holds: bool, what: str) -> None:
        if not holds:
            raise Broken(what)
