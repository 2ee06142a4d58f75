"""R11: replicas that share an L2, in simulated time: faults, restarts, and invalidations from each of them.

Whoever asks for an invalidation ends an epoch of the chunks that it takes, and what is computed in the next has other
bytes. A request that a replica admits after it has read the invalidation, or after it was acknowledged to have made it,
must never be given bytes of an epoch before.
"""

import random
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from hotspan.cache.choice import Text as Prompt
from hotspan.cache.cost import CostModel
from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey, Lookup, Tier
from hotspan.proofs.engine import Broken, Text, texts
from hotspan.proofs.proof import Findings, Progress, Proof, rng_of
from hotspan.testing.chunks import content
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.inline import InlineQueues
from hotspan.testing.keys import FixedKeys
from hotspan.testing.memory_store import MemoryLog, MemoryServer, MemoryStore
from hotspan.tiers.follower import LogFollower
from hotspan.tiers.guard import GuardedTier
from hotspan.tiers.remote import RemoteOptions, RemoteTier
from hotspan.tiers.slab import SharedSlab

CLAIM = "replicas that share an L2 hit their own tenants' bytes and nothing that was invalidated, whatever fails"
SIZE = 4096
NAMESPACE = bytes(range(32))
WEIGHTS = {
    "arrive": 20,
    "ask": 16,
    "end_store": 10,
    "turn": 30,
    "step": 12,
    "poll": 8,
    "time": 6,
    "long_time": 1,
    "invalidate": 3,
    "evict": 3,
    "crash": 0.5,
    "fail": 1.5,
    "slow": 0.7,
    "hang": 0.7,
    "repair": 3,
    "lose": 0.2,
    "trim": 0.3,
}


@dataclass(frozen=True, slots=True)
class Options:
    """seeds: simulations of `steps` each, with 2 to 4 replicas, plain and sealed in turns."""

    seeds: int = 100
    steps: int = 600
    seed: int = 0
    only: int | None = None


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


class _SettledGuard(GuardedTier):
    def finished(self) -> list:  # type: ignore[type-arg]
        transfers = super().finished()
        if self._opening is not None:
            self._opening.join()
        return transfers


class Replica:
    """One process: RAM over the L2, and an engine that believes nothing."""

    def __init__(self, name: str, server: MemoryServer, epochs: Epochs, rng: random.Random, *, is_sealed: bool) -> None:
        self.name = name
        self.least = dict.fromkeys(epochs.latest, 0)  # of epochs, for requests that are admitted now
        self.present = dict.fromkeys(epochs.latest, 0)  # of what they compute
        self.hits = self.l2_hits = self.stores = self.cuts = 0
        self._server = server
        self._epochs = epochs
        self._rng = rng
        self._is_sealed = is_sealed
        self._lives = 0
        self._slab = SharedSlab(f"proof-{uuid.uuid4().hex}", rng.randint(5, 9), SIZE)
        self._slab.unlink()
        self.start()

    def start(self) -> None:
        """A process begins, with nothing in RAM."""
        self._lives += 1
        self.asked: list[Asked] = []
        self.copies: list[Copies] = []
        self.queues = InlineQueues(self._rng.getrandbits(32))
        clock = self._server.clock
        self.follower = LogFollower(MemoryLog(self._server), f"{self.name}/{self._lives}", clock)
        writer = self._rng.getrandbits(60)

        def opened(again: bool) -> RemoteTier:
            keys = FixedKeys(writer + again, seed=7) if self._is_sealed else None
            options = RemoteOptions(
                MemoryStore(self._server), self.follower, threads=2, store_depth=3, keys=keys, queue=self.queues.queue
            )
            return RemoteTier(options, NAMESPACE, SIZE, clock)

        self.tier = _SettledGuard(opened, clock)
        cost = CostModel(2048, {Tier.L2: 2}, clock) if self._rng.random() < 0.5 else None
        self.cache = TieredCache(self._slab, self.tier, namespace=NAMESPACE, cost=cost, clock=clock)

    def close(self) -> None:
        """All is over."""
        self.tier.close(1.0)
        self._slab.close()

    # -- what an engine does -----------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Forget what others invalidated, before anything is admitted."""
        for scope in self.follower.foreign():
            self.cache.invalidate(scope, lambda done: None, is_foreign=True)
            self._disown()
            if id(scope) in self._epochs.taken:
                self._bind(*self._epochs.taken[id(scope)])
            else:  # the log was lost: all that was ever invalidated is forgotten with everything else
                self.present = dict(self._epochs.latest)

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
        self.cache.invalidate(scope, durable)

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


class World:
    """The replicas and their server."""

    def __init__(self, rng: random.Random, *, is_sealed: bool) -> None:
        self.steps = 0
        self.counts = dict.fromkeys(("invalidations", "crashes", "losses", "faults"), 0)
        self._rng = rng
        self._clock = SimulatedClock()
        self._texts = [Text(text.chunks, text.tenant, frozenset({text.tenant})) for text in texts(3)]
        self._parents = {chunk.key: chunk.parent for text in self._texts for chunk in text.chunks}
        self._labels = {chunk.key: text.labels for text in self._texts for chunk in text.chunks}
        self._epochs = Epochs(dict.fromkeys(self._parents, 0))
        self._server = MemoryServer(clock=self._clock, before=self._before)
        self._chance, self._slow_s = 0.0, 0.0
        names = "abcd"[: rng.randint(2, 4)]
        self.replicas = [Replica(name, self._server, self._epochs, rng, is_sealed=is_sealed) for name in names]

    def run(self, steps: int) -> None:
        """Random steps of random replicas. Raises: Broken."""
        for name in self._rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=steps):
            self.steps += 1
            replica = self._rng.choice(self.replicas)
            getattr(self, "_" + name)(replica)
            replica.check()

    def end(self) -> None:
        """All is well again: every replica ends what it is at. Raises: Broken if anything is left over."""
        for replica in self.replicas:
            self._repair(replica)
        for _ in range(60):
            self._clock.advance(0.5)
            for replica in self.replicas:
                replica.follower.poll()
                replica.follow()
                replica.queues.run()
                replica.cache.step()
                for asked in list(replica.asked):
                    replica.look(asked)
                replica.end_store()
        for replica in self.replicas:
            replica.check()
            if replica.asked or replica.cache.is_moving or replica.cache.ram.is_pinned or not replica.tier.is_up:
                raise Broken(f"{replica.name} is not at rest though all is well")
            replica.close()

    # -- steps -------------------------------------------------------------------------------------------------------

    def _arrive(self, replica: Replica) -> None:
        if len(replica.asked) < 4:
            replica.arrive(self._rng.choice(self._texts))

    def _ask(self, replica: Replica) -> None:
        if replica.asked:
            replica.look(self._rng.choice(replica.asked))

    def _end_store(self, replica: Replica) -> None:
        replica.end_store()

    def _turn(self, replica: Replica) -> None:
        replica.queues.run(self._rng.randint(1, 4))

    def _step(self, replica: Replica) -> None:
        replica.cache.step()

    def _poll(self, replica: Replica) -> None:
        replica.follower.poll()

    def _time(self, replica: Replica) -> None:
        self._clock.advance(self._rng.uniform(0.001, 0.07))

    def _long_time(self, replica: Replica) -> None:
        self._clock.advance(self._rng.uniform(0.5, 12))
        for each in self.replicas:
            if self._rng.random() < 0.8:
                each.follower.poll()

    def _invalidate(self, replica: Replica) -> None:
        text = self._rng.choice(self._texts)
        scopes = (
            Scope(labels=text.labels),
            Scope(keys=frozenset({self._rng.choice(text.chunks).key})),
            Scope(tenant=text.tenant),
            Scope(namespace=NAMESPACE),
        )
        scope = self._rng.choices(scopes, (5, 8, 2, 1))[0]
        taken = {
            key
            for key, labels in self._labels.items()
            if scope.takes(key, NAMESPACE, Terms(tenant=min(labels), labels=labels))
        }
        for key, parent in self._parents.items():  # parents come before their children
            if parent in taken:
                taken.add(key)
        epoch = 1 + max(self._epochs.latest.values())
        for key in taken:
            self._epochs.latest[key] = epoch
        self._epochs.taken[id(scope)] = (epoch, taken)
        self._epochs.scopes.append(scope)
        self.counts["invalidations"] += 1
        replica.invalidate(scope, taken, epoch)

    def _evict(self, replica: Replica) -> None:
        replica.evict()

    def _crash(self, replica: Replica) -> None:
        self.counts["crashes"] += 1
        replica.start()

    def _fail(self, replica: Replica) -> None:
        self.counts["faults"] += 1
        self._chance = self._rng.choice((0.05, 0.3, 1.0))

    def _slow(self, replica: Replica) -> None:
        self._slow_s = self._rng.choice((0.005, 0.06, 0.5))

    def _hang(self, replica: Replica) -> None:
        replica.queues.hang()

    def _repair(self, replica: Replica) -> None:
        self._chance = self._slow_s = 0.0
        replica.queues.hang(False)

    def _lose(self, replica: Replica) -> None:
        """The server restarts, and has nothing."""
        self.counts["losses"] += 1
        self._server.lose()

    def _trim(self, replica: Replica) -> None:
        """The log gets too long, or the server evicts an object."""
        entries = self._server.entries
        if entries:
            cut = self._rng.randrange(len(entries))
            self._server.floor = max([self._server.floor, *(entry.generation for entry in entries[:cut])])
            del entries[:cut]
        for key in self._rng.sample(sorted(self._server.objects), min(3, len(self._server.objects))):
            del self._server.objects[key]

    def _before(self, method: str) -> None:
        if self._slow_s:
            self._clock.advance(self._slow_s)
        if self._chance and self._rng.random() < self._chance:
            raise ConnectionError("injected")


def run(options: Options, progress: Progress) -> Proof:
    """Simulation after simulation, each a case."""
    findings = Findings()
    figures = dict.fromkeys(
        ("steps", "invalidations", "crashes", "losses", "faults", "hits", "l2_hits", "stores", "cuts"), 0
    )
    cases: Sequence[int] = range(options.seeds) if options.only is None else [options.only]
    for done, case in enumerate(cases, 1):
        world = World(rng_of("replicas", options.seed, case), is_sealed=case % 2 == 1)
        try:
            world.run(options.steps)
            world.end()
        except (Broken, AssertionError) as error:
            findings.add(case, f"step {world.steps}: {error}")
        figures["steps"] += world.steps
        for name, value in world.counts.items():
            figures[name] += value
        for name in ("hits", "l2_hits", "stores", "cuts"):
            figures[name] += sum(getattr(replica, name) for replica in world.replicas)
        progress(done, len(cases))
    enough = options.only is not None or (figures["l2_hits"] > 0 and figures["losses"] > 0)
    said = {"simulations": len(cases), **figures, "failures": findings.count}
    return Proof("replicas", CLAIM, said, not findings.count and enough, tuple(findings.kept))
