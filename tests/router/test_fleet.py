"""The fleet: what was sent counts at once, sessions stay where they should, and nothing is left behind."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB
from hotspan.router.fleet import Fleet, NoReplicaError, Ticket
from hotspan.router.index import PrefixIndex
from hotspan.router.load import Speeds
from hotspan.router.types import Ask, Medium, Strategy
from hotspan.testing.clock import SimulatedClock

NAMES = [f"http://10.0.0.{n}:8000" for n in range(4)]


def fleet(names: Sequence[str] = NAMES, *, exact: bool = False, **options: Any) -> Fleet:
    """Idle replicas of 1,000 tokens a second."""
    made = Fleet(clock=options.pop("clock", SimulatedClock()), rng=random.Random(0), **options)
    for name in names:
        made.add(name, speeds=Speeds(tokens_per_s=1000), exact=exact)
    return made


def ask(*keys: int, session: bytes = b"", tokens: int = 0) -> Ask:
    """A prompt of these pieces, of 100 tokens each."""
    return Ask(keys=keys, tokens=tokens or 100 * len(keys) + 10, piece_tokens=100.0, session=session)


def send(to: Fleet, what: Ask, **limits: Any) -> Ticket:
    """Choose and dispatch."""
    return to.dispatch(what, to.choose(what, **limits))


def test_a_shared_system_prompt_does_not_go_to_one_replica() -> None:
    """Prompts that differ only after what all share spread evenly, with and without events."""
    for exact in (False, True):
        router = fleet(exact=exact)
        shared = tuple(range(20))
        for slot in range(4):
            router.index.add(slot, Medium.GPU, shared[: 20 if exact and slot == 0 else 0])
        tickets = [send(router, ask(*shared, *range(1000 * n, 1000 * n + 20))) for n in range(1, 81)]
        count = Counter(ticket.decision.name for ticket in tickets)
        assert max(count.values()) <= 30
        assert len(count) == 4


def test_one_that_is_added_counts_as_fast_as_the_others_are_known_to_be() -> None:
    """At once, and not only after the next answer: else it would get everything, or nothing, until then."""
    router = fleet(["a"])
    router.tell("a", Speeds(tokens_per_s=4000))
    router.add("b", speeds=Speeds(tokens_per_s=1000))
    assert router.replicas["b"].load.tokens_per_s == pytest.approx(4000)
    assert router.replicas["a"].load.pace == router.replicas["b"].load.pace


def test_no_herd_before_the_first_answer() -> None:
    """Requests that come at once spread, although nobody has answered and no clock has moved."""
    router = fleet()
    tickets = [send(router, ask(*range(100 * n, 100 * n + 50))) for n in range(40)]
    assert set(Counter(ticket.decision.name for ticket in tickets).values()) <= {8, 9, 10, 11, 12}


def test_a_shared_prompt_does_not_gather_answers() -> None:
    """Where prompts cost nothing, being held at one replica already, long answers spread all the same."""
    router = fleet(exact=True)
    router.index.add(0, Medium.GPU, range(20))
    tickets = []
    for n in range(400):
        tickets.append(send(router, replace(ask(*range(20), 1000 + n), answer_tokens=1000)))
        tickets[-1].first_byte()
    count = Counter(ticket.decision.name for ticket in tickets)
    assert max(count.values()) < 160
    assert min(count[name] for name in NAMES) > 40
    for ticket in tickets[:300]:
        ticket.end(answer_tokens=2000)
    before = router.choose(ask(7), among=[NAMES[0]]).costs["decode"]
    assert before > 2 * router.replicas[NAMES[0]].load.in_flight * 0.0002 * 128 * 0.5


def test_follow_ups_go_where_the_prompt_went() -> None:
    """Without events by what was sent; with events by that until they come, and then by them."""
    for exact in (False, True):
        clock = SimulatedClock()
        router = fleet(exact=exact, clock=clock)
        first = send(router, ask(*range(50)))
        clock.advance(1.0)
        again = router.choose(ask(*range(60)))
        assert again.name == first.decision.name
        assert again.cached_tokens == 5000
        first.first_byte()
        first.end()
        assert router.choose(ask(*range(60))).cached_tokens == (0 if exact else 5000)
        if exact:
            router.index.add(2, Medium.RAM, range(50))
            assert router.choose(ask(*range(60))).name == NAMES[2]


def test_l2_is_everybodys() -> None:
    """What L2 has is as near to every replica, also to one that holds nothing itself."""
    router = fleet(exact=True)
    router.index.add(0, Medium.L2, range(50))
    router.index.add(1, Medium.GPU, range(2))
    decisions = [router.choose(ask(*range(50)), among=[name]) for name in NAMES]
    assert all(decision.cached_tokens >= 4900 for decision in decisions)
    assert [decision.load_s > 0 for decision in decisions] == [True] * 4


def test_kvaware_believes_only_events_and_prefixaware_only_dispatches() -> None:
    """Each strategy knows what its name says."""
    for strategy in (Strategy.KVAWARE, Strategy.PREFIXAWARE):
        router = fleet(exact=True, strategy=strategy)
        send(router, ask(*range(50)), among=[NAMES[3]]).end()
        router.index.add(0, Medium.GPU, range(50))
        expected = NAMES[0] if strategy is Strategy.KVAWARE else NAMES[3]
        assert router.choose(ask(*range(50))).name == expected


def test_what_was_assumed_ages_out() -> None:
    """A replica without events is taken to keep as much as it says, the longest unused forgotten first."""
    router = fleet(NAMES[:1])
    router.tell(NAMES[0], Speeds(tokens_per_s=1000, cache_tokens=5000))
    for at in range(0, 60, 20):
        send(router, ask(*range(at, at + 20))).end()
    assert router.choose(ask(*range(20))).cached_tokens == 1000
    assert router.choose(ask(*range(20, 40))).cached_tokens == 2000
    assert len(router.index) == 50
    router.check()


def test_a_failed_request_leaves_nothing() -> None:
    """What never began to answer is taken neither for held nor for work; what had been held before stays."""
    for exact in (False, True):
        router = fleet(NAMES[:1], exact=exact)
        before = send(router, ask(*range(10)))
        before.first_byte()
        if not exact:
            before.end()
        send(router, ask(*range(30))).end(failed=True)
        assert router.choose(ask(*range(30))).cached_tokens == 1000
        assert router.choose(ask(1)).costs["queue"] == 0
        router.check()


def test_tickets_end_once() -> None:
    """Any number of calls counts as one, in any order, also after the replica is gone."""
    router = fleet(NAMES[:1])
    ticket = send(router, ask(1, 2, 3))
    load = router.replicas[NAMES[0]].load
    for _ in range(2):
        ticket.first_byte()
    assert (load.in_flight, load.running) == (1, 1)
    for _ in range(2):
        ticket.end()
        ticket.first_byte()
    assert (load.in_flight, load.running) == (0, 0)
    late = send(router, ask(1, 2, 3))
    router.remove(NAMES[0])
    router.add(NAMES[1])
    late.first_byte()
    late.end()
    assert router.choose(ask(1, 2, 3)).cached_tokens == 0
    router.check()


def test_who_may_be_chosen() -> None:
    """Only those that are up, among those named, and none that was excluded; else it is an error that says so."""
    router = fleet()
    router.set_up(NAMES[0], False)
    limits = {"among": NAMES[:3], "without": [NAMES[1]]}
    assert {router.choose(ask(n), **limits).name for n in range(20)} == {NAMES[2]}
    with pytest.raises(NoReplicaError, match="of 4 replicas"):
        router.choose(ask(1), among=NAMES[:1])
    decision = router.choose(ask(1), among=NAMES[1:2])
    router.remove(NAMES[1])
    with pytest.raises(NoReplicaError, match="choose again"):
        router.dispatch(ask(1), decision)
    with pytest.raises(ConfigError, match="twice"):
        router.add(NAMES[0])


@pytest.mark.parametrize("strategy", [Strategy.SESSION, Strategy.AUTO])
def test_routers_agree_on_sessions(strategy: Strategy) -> None:
    """Two routers that share nothing send a session to the same replica."""
    one, other = fleet(strategy=strategy), fleet(NAMES[::-1], strategy=strategy)
    for n in range(100):
        what = ask(n, session=b"%016d" % n, tokens=1000)
        assert one.choose(what).name == other.choose(what).name


def serve(to: Fleet, clock: SimulatedClock, what: Ask, truth: float, noise: Mapping[str, float] | None = None) -> str:
    """Send one alone, to replicas that compute `truth` tokens a second, each times its noise; who took it."""
    ticket = send(to, what)
    name = ticket.decision.name
    clock.advance((what.tokens - ticket.decision.cached_tokens) / (truth * (noise or {}).get(name, 1.0)))
    ticket.first_byte()
    ticket.end(answer_tokens=16)
    return name


@pytest.mark.parametrize("strategy", [Strategy.AUTO, Strategy.PREFIXAWARE])
@pytest.mark.parametrize("truth", [100.0, 8_000.0, 12_000.0, 20_000.0, 50_000.0])
def test_whoever_is_known_does_not_get_everything(truth: float, strategy: Strategy) -> None:
    """Equal replicas share a light load, however far their speed is from what they are first taken to do."""
    for seed in range(3):
        clock, rng = SimulatedClock(), random.Random(seed)
        router = Fleet(clock=clock, rng=rng, strategy=strategy)
        noise = {name: rng.uniform(0.9, 1.1) for name in NAMES}
        for name in NAMES:
            router.add(name)
        count: Counter[str] = Counter()
        for n in range(400):
            what = ask(n, session=b"%016d" % rng.getrandbits(40), tokens=rng.randrange(500, 8000))
            count[serve(router, clock, what, truth, noise)] += 1
        assert min(count[name] for name in NAMES) > 60, count


@pytest.mark.parametrize("requests", [1, 3, 100])
@pytest.mark.parametrize("truth", [100.0, 12_000.0, 50_000.0])
def test_routers_with_other_histories_agree_on_sessions(truth: float, requests: int) -> None:
    """What each has learnt of the replicas' speed is its own, with noise of 10 %; where sessions live is not."""
    rng, routers = random.Random(requests), []
    for names in (NAMES, NAMES[::-1]):
        clock = SimulatedClock()
        router = Fleet(clock=clock, rng=random.Random(rng.random()))
        for name in names:
            router.add(name)
        noise = {name: rng.uniform(0.9, 1.1) for name in NAMES}
        for _ in range(requests):
            own = rng.getrandbits(40)
            serve(router, clock, ask(own, session=b"%016d" % own, tokens=2000), truth, noise)
        routers.append(router)
    one, other = routers
    for n in range(200):
        what = ask(n, session=b"%016d" % n, tokens=1000)
        assert one.choose(what).name == other.choose(what).name == one.choose(what).home


@pytest.mark.parametrize("strategy", [Strategy.SESSION, Strategy.AUTO])
def test_only_the_sessions_of_a_lost_replica_move(strategy: Strategy) -> None:
    """All others stay; when it is back, its sessions come back."""
    router = fleet(strategy=strategy)
    asks = [ask(n, session=b"%016d" % n, tokens=1000) for n in range(200)]
    before = [router.choose(what).name for what in asks]
    router.set_up(NAMES[0], False)
    after = [router.choose(what).name for what in asks]
    assert all(was == now or was == NAMES[0] for was, now in zip(before, after, strict=True))
    assert {now for was, now in zip(before, after, strict=True) if was == NAMES[0]} == set(NAMES[1:])
    router.set_up(NAMES[0], True)
    assert [router.choose(what).name for what in asks] == before


def test_a_session_that_was_moved_stays_where_it_moved() -> None:
    """`auto` moves a session because that is cheaper, remembers it, and forgets the longest unused."""
    router = fleet(max_moved=2)
    what = ask(1, session=b"s" * 16, tokens=1000)
    home = router.choose(what)
    busy = router.dispatch(ask(tokens=50_000), home)
    moved = send(router, what)
    assert moved.decision.name != home.name
    busy.end()
    moved.end()
    again = router.choose(what)
    assert (again.name, again.session_bound, len(router.moved)) == (moved.decision.name, True, 1)
    router.set_up(moved.decision.name, False)
    assert router.choose(what).name != moved.decision.name
    router.set_up(moved.decision.name, True)
    for n in range(50):
        send(router, ask(n, session=b"%016d" % n, tokens=50_000))
    assert len(router.moved) <= 2


def test_when_events_fail_it_starts_from_its_own_dispatches() -> None:
    """What events told is not believed any longer, and what was sent is; and the other way round."""
    router = fleet(NAMES[:1], exact=True)
    router.index.add(0, Medium.GPU, range(10))
    router.set_exact(NAMES[0], False)
    assert router.choose(ask(*range(10))).cached_tokens == 0
    send(router, ask(*range(20, 30))).end()
    assert router.choose(ask(*range(20, 30))).cached_tokens == 1000
    router.set_exact(NAMES[0], True)
    assert router.choose(ask(*range(20, 30))).cached_tokens == 0
    router.index.add(0, Medium.GPU, range(10))
    router.forget(NAMES[0])
    assert router.choose(ask(*range(10))).cached_tokens == 0


def test_round_robin_is_even() -> None:
    """To the request."""
    router = fleet(strategy=Strategy.ROUNDROBIN)
    count = Counter(send(router, ask(n)).decision.name for n in range(40))
    assert set(count.values()) == {10}


def test_many_distinct_prompts_take_no_more_room() -> None:
    """The index stays below its cap, and what is assumed below its own."""
    router = fleet(index=PrefixIndex(MIB), assumed_pieces=1000)
    for n in range(3000):
        ticket = send(router, ask(*range(100 * n, 100 * n + 20), session=b"%016d" % n))
        ticket.first_byte()
        ticket.end()
        assert router.index.bytes <= MIB
    assert len(router.index) <= 4000
    router.check()


class Fleets(RuleBasedStateMachine):
    """Anything in any order: never an error, the account adds up, and no queue is shorter than nothing."""

    @initialize(strategy=st.sampled_from(Strategy), cap=st.sampled_from([1 << 16, MIB]))
    def begin(self, strategy: Strategy, cap: int) -> None:
        self.clock = SimulatedClock()
        self.fleet = Fleet(
            strategy=strategy,
            index=PrefixIndex(cap),
            clock=self.clock,
            rng=random.Random(1),
            assumed_pieces=40,
            max_moved=3,
        )
        self.names: dict[str, int] = {}
        self.open: list[tuple[str, Ticket]] = []

    @rule(name=st.sampled_from(NAMES), exact=st.booleans())
    def add_or_remove(self, name: str, exact: bool) -> None:
        if name in self.names:
            self.fleet.remove(name)
            del self.names[name]
            for where, ticket in self.open:
                if where == name:
                    ticket.end()
            self.open = [(where, ticket) for where, ticket in self.open if where != name]
        else:
            self.names[name] = self.fleet.add(name, exact=exact)

    @precondition(lambda self: self.names)
    @rule(
        keys=st.integers(0, 20),
        first=st.integers(0, 5),
        tokens=st.integers(0, 3000),
        session=st.sampled_from([b"", *(b"%016d" % n for n in range(5))]),
        without=st.sets(st.sampled_from(NAMES), max_size=2),
    )
    def send(self, keys: int, first: int, tokens: int, session: bytes, without: set[str]) -> None:
        what = ask(*range(100 * first, 100 * first + keys), session=session, tokens=tokens)
        before_s = {name: self.queue_s(name) for name in self.names}
        try:
            ticket = send(self.fleet, what, without=without)
        except NoReplicaError:
            return
        name = ticket.decision.name
        assert name in self.names.keys() - without
        assert self.queue_s(name) == pytest.approx(before_s[name] + ticket.work_s)
        assert 0 <= ticket.decision.cached_tokens <= what.tokens
        self.open.append((ticket.decision.name, ticket))

    def queue_s(self, name: str) -> float:
        return self.fleet.replicas[name].load.queue_s(self.clock.monotonic())

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ends=st.booleans(), failed=st.booleans())
    def answer(self, data: st.DataObject, ends: bool, failed: bool) -> None:
        at = data.draw(st.integers(0, len(self.open) - 1))
        if ends:
            self.open.pop(at)[1].end(failed=failed)
        else:
            self.open[at][1].first_byte()

    @precondition(lambda self: self.names)
    @rule(data=st.data(), is_so=st.booleans(), what=st.sampled_from(["up", "exact", "forget", "tell"]))
    def change(self, data: st.DataObject, is_so: bool, what: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.names)))
        if what == "up":
            self.fleet.set_up(name, is_so)
        elif what == "exact":
            self.fleet.set_exact(name, is_so)
        elif what == "forget":
            self.fleet.forget(name)
        else:
            self.fleet.tell(name, Speeds(tokens_per_s=500, cache_tokens=2000))

    @precondition(lambda self: self.names)
    @rule(data=st.data(), medium=st.sampled_from(Medium), first=st.integers(0, 5), is_there=st.booleans())
    def event(self, data: st.DataObject, medium: Medium, first: int, is_there: bool) -> None:
        slot = self.names[data.draw(st.sampled_from(sorted(self.names)))]
        keys = range(100 * first, 100 * first + 10)
        (self.fleet.index.add if is_there else self.fleet.index.remove)(slot, medium, keys)

    @rule(seconds=st.floats(0, 10))
    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "fleet"):
            self.fleet.check()
            in_flight = Counter(name for name, _ in self.open)
            for name, replica in self.fleet.replicas.items():
                load = replica.load
                assert load.in_flight == in_flight[name] and 0 <= load.running <= load.in_flight
                assert self.queue_s(name) >= -1e-6
                assert load.running < load.in_flight or self.queue_s(name) == 0
            assert len(self.fleet.moved) <= 3

    def teardown(self) -> None:
        """When all has ended, no work is left, and with events nothing is assumed."""
        if hasattr(self, "fleet"):
            for _, ticket in self.open:
                ticket.end()
            for name, replica in self.fleet.replicas.items():
                assert self.queue_s(name) == 0
                if replica.is_exact and self.fleet.strategy is not Strategy.PREFIXAWARE:
                    self.fleet.index.clear(self.names[name], Medium.GPU)
            self.fleet.check()


TestFleets = Fleets.TestCase
TestFleets.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    "broken",
    [
        lambda router: router._free_slots.append(0),
        lambda router: router.replicas[NAMES[0]].assumed.update(dict.fromkeys(range(99_999), 0)),
        lambda router: setattr(router.replicas[NAMES[0]].load, "running", -1),
        lambda router: setattr(router.index, "max_pieces", 0),
    ],
)
def test_check_finds(broken: Callable[[Fleet], object]) -> None:
    """`check` can fail."""
    router = fleet()
    router.index.add(0, Medium.GPU, [1, 2])
    router.check()
    broken(router)
    with pytest.raises(AssertionError):
        router.check()
