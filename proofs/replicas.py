"""R11: replicas that share an L2, in simulated time: faults, restarts, and invalidations from each of them.

What each of them must never be given stands in proofs/replica.py.
"""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.clock import Clock
from hotspan.core.terms import Scope, Terms
from hotspan.l2.base import ObjectStore
from hotspan.l2.node import NodeStore
from hotspan.testing.clock import SimulatedClock
from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.memory_store import OBJECT_KINDS, BadObjects, MemoryServer
from proofs.disk import NAMESPACE
from proofs.engine import Broken, Text, texts
from proofs.epochs import Epochs, Held
from proofs.replica import Connect, Replica

CLAIM = "replicas that share an L2 hit their own tenants' bytes and nothing that was invalidated, whatever fails"
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
    "hold": 3,
    "send": 3,
    "copy": 2,
    "send_copy": 2,
    "announce": 2,
    "come": 0.5,
}


_BAD_PART = 0.25
"""Of the chunks of two worlds in five, those whose objects are bad."""

OF_REPLICAS = ("hits", "disk_hits", "l2_hits", "stores", "cuts", "withdrawn", "announced", "copied")


@dataclass(frozen=True, slots=True)
class Options:
    """seeds: simulations of `steps` each, with 2 to 4 replicas, plain and sealed in turns."""

    seeds: int = 100
    steps: int = 600
    seed: int = 0
    only: int | None = None


class World:
    """The replicas and their server.

    connect: to another store than the server, of which the steps `lose` and `trim` know nothing.
    bad_part: of the chunks whose objects on the server are bad (OBJECT_KINDS), for good or until they are made anew.
    weights: how often each step is taken.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        is_sealed: bool,
        connect: Connect | None = None,
        weights: Mapping[str, float] = WEIGHTS,
        bad_part: float = 0.0,
    ) -> None:
        self.steps = 0
        self.counts = dict.fromkeys(("invalidations", "crashes", "losses", "faults"), 0)
        self.met: Counter[str] = Counter()  # calls that met a bad object, by its kind
        self._rng = rng
        self._weights = weights
        self._clock = SimulatedClock()
        self._texts = [Text(text.chunks, text.tenant, frozenset({text.tenant})) for text in texts(3)]
        self._parents = {chunk.key: chunk.parent for text in self._texts for chunk in text.chunks}
        self._labels = {chunk.key: text.labels for text in self._texts for chunk in text.chunks}
        self._epochs = Epochs(dict.fromkeys(self._parents, 0))
        self._copies: list[Held] = []  # that a router holds
        self._chance, self._slow_s = 0.0, 0.0
        # In some worlds the store is a daemon that starts after the replicas: where nothing was, or another one.
        self._comes_late = rng.choice((None, None, "alone", "after another")) if connect is None else None
        self._has_come = self._comes_late is None
        self._is_sealed = is_sealed
        names = self._names()
        if connect is None:
            self._server = BadObjects(
                *(self._clock,), before=self._before, evicts=rng.random() < 0.5, wait=self._clock.advance, met=self.met
            )
            if bad_part:
                keys = rng.sample(list(self._parents), max(1, round(bad_part * len(self._parents))))
                self._server.bad = {key: rng.choice(OBJECT_KINDS) for key in keys}
                self._server.moves = rng.random() < 0.5

            def connect(clock: Clock) -> ObjectStore:
                if self._comes_late is None:
                    return self._server.store()
                # What answers at the port until the daemon comes has no log that replicas share, so that they share
                # no chunks there either: what another one stores without one, nobody here can know to be invalidated.
                other = MemoryServer(self._clock, before=self._before)
                return NodeStore(self._server.store(), other.store(), lambda: self._has_come, self._answer, clock)

        self.replicas = [self._replica(name, connect) for name in names]

    def _names(self) -> str:
        return "abcd"[: self._rng.randint(2, 4)]

    def _replica(self, name: str, connect: Connect) -> Replica:
        return Replica(name, connect, self._clock, self._epochs, self._rng, is_sealed=self._is_sealed)

    def figures(self) -> dict[str, int]:
        """How often what happened.

        read: entries of the log from which replicas learnt what others took. late: the daemon started after them.
        copied: copies that were sent after the replica knew of an invalidation of their text.
        calls_at_*_objects: calls that met an object that is bad in this way.
        """
        figures = {"steps": self.steps, **self.counts, "read": self._epochs.read, "late": self._comes_late is not None}
        figures |= {f"calls_at_{kind}_objects": self.met[kind] for kind in OBJECT_KINDS}
        return figures | {name: sum(getattr(replica, name) for replica in self.replicas) for name in OF_REPLICAS}

    def run(self, steps: int) -> None:
        """Random steps of random replicas. Raises: Broken."""
        for name in self._rng.choices(list(self._weights), list(self._weights.values()), k=steps):
            self.steps += 1
            replica = self._rng.choice(self.replicas)
            getattr(self, "_" + name)(replica)
            self.after(replica)
            replica.check()

    def after(self, replica: Replica) -> None:
        """Called after each step with the replica that took it."""

    def settle(self) -> float:
        """All is well again: every replica ends what it is at. Seconds until they had, of the simulated clock.

        Raises: Broken if they don't.
        """
        started_s = self._clock.monotonic()
        self._has_come = True
        for replica in self.replicas:
            self._repair(replica)
        for _ in range(60):
            self._clock.advance(0.5)
            for replica in self.replicas:
                replica.follower.poll()
                replica.follow()
                replica.turn()
                replica.step()
                for asked in list(replica.asked):
                    replica.look(asked)
                replica.end_load()
                replica.end_store()
                replica.check()
            if all(replica.is_at_rest for replica in self.replicas):
                return self._clock.monotonic() - started_s
        raise Broken("not all replicas are at rest though all is well")

    def read_all(self) -> None:
        """A replica is started anew and asks for every text. Raises: Broken."""
        replica = self._rng.choice(self.replicas)
        replica.start(may_decide=False)
        self.settle()
        for text in self._texts:
            replica.arrive(text)
            self.settle()

    def end(self) -> None:
        """All is well again, and everybody goes. Raises: Broken if anything is left over."""
        self.settle()
        for replica in self.replicas:
            replica.close()

    def abandon(self) -> None:
        """Let go of everything, whatever state it is in."""
        for replica in self.replicas:
            replica.abandon()

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
        replica.turn(self._rng.randint(1, 4))

    def _step(self, replica: Replica) -> None:
        replica.step()

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

    def _hold(self, replica: Replica) -> None:
        if len(replica.held) < 4:
            replica.hold(self._rng.choice(self._texts))

    def _send(self, replica: Replica) -> None:
        if len(replica.asked) < 4:
            replica.send()

    def _copy(self, replica: Replica) -> None:
        """A router copies a request of a replica's, and holds the copy until the replica has answered."""
        if len(self._copies) < 4:
            replica.follow()
            self._copies.append(Held(self._rng.choice(self._texts), self._clock.monotonic(), dict(replica.present)))

    def _send_copy(self, replica: Replica) -> None:
        """It sends one, to whichever replica."""
        if self._copies and len(replica.asked) < 4:
            replica.copy(self._copies.pop(self._rng.randrange(len(self._copies))))

    def _announce(self, replica: Replica) -> None:
        replica.announce(self._rng.choice(self._texts))

    def _come(self, replica: Replica) -> None:
        self._has_come = True

    def _answer(self) -> None:
        if self._comes_late == "alone":
            raise ConnectionError("nothing answers at the port")

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
        self._server.data.clear()

    def _trim(self, replica: Replica) -> None:
        """The log gets too long, and the server evicts what it may."""
        data = self._server.data
        entries = sorted(name for name in data if name.startswith("log/"))
        kinds = ("objects/", "metadata/") if self._server.evicts else ("objects/",)
        others = sorted(name for name in data if name.startswith(kinds))
        evicted = self._rng.sample(others, min(3, len(others)))
        for name in [*entries[: self._rng.randrange(len(entries) or 1)], *evicted]:
            del data[name]

    def _before(self, call: str) -> None:
        if self._slow_s:
            self._clock.advance(self._slow_s)
        if self._chance and self._rng.random() < self._chance:
            raise ConnectionError("injected")


def run(options: Options, progress: Progress) -> Proof:
    """Simulation after simulation, each a case."""

    def made(root: Path, case: int) -> World:
        bad_part = _BAD_PART if case % 5 < 2 else 0.0
        return World(rng_of("replicas", options.seed, case), is_sealed=case % 2 == 1, bad_part=bad_part)

    at_bad = tuple(f"calls_at_{kind}_objects" for kind in OBJECT_KINDS)
    shown = ("l2_hits", "losses", "read", "withdrawn", "announced", "copied", "late", *at_bad)
    return simulate("replicas", CLAIM, options, made, shown, progress)


def simulate(
    name: str,
    claim: str,
    options: Options,
    made: Callable[[Path, int], World],
    shown: Sequence[str],
    progress: Progress,
) -> Proof:
    """World after world; whatever a call raises is a finding, too.

    made: the world of a case, whose files may lie in a directory. shown: figures without which it was about nothing.
    """
    findings, totals = Findings(), Counter[str]()
    cases: Sequence[int] = range(options.seeds) if options.only is None else [options.only]
    for done, case in enumerate(cases, 1):
        with in_memory() as root:
            world = made(root, case)
            try:
                world.run(options.steps)
                world.end()
            except Exception as error:
                what = str(error) if isinstance(error, Broken | AssertionError) else f"{type(error).__name__}: {error}"
                findings.add(case, f"step {world.steps}: {what}")
                world.abandon()
        totals.update(world.figures())
        progress(done, len(cases))
    enough = options.only is not None or all(totals[figure] for figure in shown)
    figures = {"simulations": len(cases), **totals, "failures": findings.count}
    return Proof(name, claim, figures, not findings.count and enough, tuple(findings.kept))
