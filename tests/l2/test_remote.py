"""The L2 tier over a store in memory: what it asks for, knows, writes and refuses."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from hotspan.core.frame import HEADER_BYTES, FrameFault, FrameIdentity, seal, segments
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2 import follower, remote
from hotspan.l2.base import PREAMBLE_BYTES, StoreUsage
from hotspan.l2.follower import STALE_S, LogFollower
from hotspan.l2.jobs import Checked
from hotspan.l2.log import VolatileLog
from hotspan.l2.objects import BlobStore
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import aligned, chain, content
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers.base import Fault, Transfer
from hotspan.tiers.record import RECORD_BYTES, unpack
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.lower import SettledTier
from kit.simulated.memory_store import MemoryServer
from tests.l2.receipts import missing

SIZE = 2 * 4096
NAMESPACE = bytes(range(32))


class Replica:
    """One replica's tier over a server that others share, on simulated time; `turn` lets its I/O happen."""

    def __init__(
        self,
        server: MemoryServer,
        name: str = "a",
        *,
        is_sealed: bool = False,
        namespace: bytes = NAMESPACE,
        has_log: bool = True,
    ) -> None:
        self.clock = server.clock
        self.queues = InlineQueues()
        log = server.log() if has_log else VolatileLog(server.clock)
        self.follower = LogFollower(log, name, server.clock)
        self.poll()
        options = RemoteOptions(
            server.store() if has_log else BlobStore(server, None),
            self.follower,
            keys=FixedKeys(sum(name.encode())) if is_sealed else None,
            queue=self.queues.queue,
        )
        self.tier = RemoteTier(options, namespace, SIZE, server.clock)

    def poll(self) -> list[Scope]:
        """Read the log, and do what it says, as the engine does; what that was."""
        self.follower.poll()
        return self.follower.foreign()

    def turn(self) -> list[Transfer]:
        """All I/O in flight ends; what ended."""
        ended = []
        for _ in range(3):
            self.queues.run()
            ended += self.tier.finished()
        return ended

    def store(self, chunks: list[Chunk], terms: Terms = Terms(), version: int = 0) -> list[Fault | None]:  # noqa: B008
        """Store chunks; how each ended."""
        for chunk in chunks:
            assert self.tier.submit_store(chunk, terms, aligned(SIZE, content(chunk.key, SIZE, version)))
        return [transfer.fault for transfer in self.turn()]

    def ask(self, chunks: list[Chunk]) -> list[bool]:
        """Ask, wait, and look up."""
        self.tier.ask(chunks, 0)
        self.turn()
        return [self.tier.lookup(chunk.key) for chunk in chunks]

    def load(self, key: ChunkKey) -> bytes | Fault | None:
        """A chunk's bytes, the fault, or None if it is not known."""
        into = aligned(SIZE)
        if not self.tier.submit_load(key, into):
            return None
        (transfer,) = self.turn()
        return transfer.fault if transfer.fault is not None else bytes(into)

    def invalidate(self, **scope: Any) -> bool:
        """Invalidate; whether that is durable."""
        told: list[bool] = []
        self.tier.invalidate([Scope(**scope)], told.append)
        self.turn()
        self.poll()
        (durable,) = told
        return durable


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer(clock=SimulatedClock())


@pytest.fixture(params=[False, True], ids=["plain", "sealed"])
def make(request: pytest.FixtureRequest, server: MemoryServer) -> Iterator[Callable[..., Replica]]:
    """Makes replicas over one server; their books are checked at the end."""
    made: list[Replica] = []

    def replica(name: str = "a", **options: Any) -> Replica:
        made.append(Replica(server, name, is_sealed=request.param, **options))
        return made[-1]

    yield replica
    server.before = lambda call: None
    for one in made:
        one.turn()
        one.tier.check()
        one.tier.close(1.0)


def test_one_replica_reads_what_another_stored(make: Callable[..., Replica]) -> None:
    """A chain that one replica stored is found by another, byte for byte, and not before it is asked for."""
    a, b = make("a"), make("b")
    chunks = chain("text", 4)
    assert a.store(chunks) == [None] * 4
    assert not any(b.tier.lookup(chunk.key) for chunk in chunks)
    assert b.ask(chunks) == [True] * 4
    assert [b.load(chunk.key) for chunk in chunks] == [content(chunk.key, SIZE) for chunk in chunks]


def test_what_is_encrypted_is_not_there_in_the_clear(server: MemoryServer) -> None:
    """With keys the store never sees a chunk's bytes; without, it does."""
    for is_sealed in (True, False):
        replica, (chunk,) = Replica(server, is_sealed=is_sealed), chain(f"text {is_sealed}", 1)
        replica.store([chunk])
        assert (content(chunk.key, SIZE) in server.data[server.objects[chunk.key]]) == (not is_sealed)
        assert replica.load(chunk.key) == content(chunk.key, SIZE)


def test_asking_takes_no_time_of_the_caller(make: Callable[..., Replica]) -> None:
    """While the store does not answer a chunk is asked for and not known; `asking` says so, and ends."""
    a = make()
    (chunk,) = chain("text", 1)
    a.tier.ask([chunk], 0)
    assert a.tier.is_asking(chunk.key) and a.tier.asking == 1 and not a.tier.lookup(chunk.key)
    a.turn()
    assert not a.tier.is_asking(chunk.key) and a.tier.asking == 0


def test_what_is_not_there_is_asked_for_again_after_a_while(make: Callable[..., Replica]) -> None:
    """An answer holds for some seconds: then what another replica stored meanwhile is found."""
    a, b = make("a"), make("b")
    chunks = chain("text", 2)
    assert b.ask(chunks) == [False, False]
    a.store(chunks)
    assert b.ask(chunks) == [False, False]
    a.clock.advance(11)
    b.poll()
    assert b.ask(chunks) == [True, True]


def test_a_chunk_is_written_once(make: Callable[..., Replica], server: MemoryServer) -> None:
    """Two replicas that store one chunk leave the first one's, on the terms of both."""
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    a.store([chunk], Terms(labels=frozenset({1})))
    before = server.data[server.objects[chunk.key]]
    b.store([chunk], Terms(labels=frozenset({2})))
    assert server.data[server.objects[chunk.key]] == before
    c = make("c")
    assert c.ask([chunk]) == [True]
    assert c.tier.terms(chunk.key).labels == {1, 2}


@pytest.mark.parametrize("how", ["flip header", "flip payload", "cut", "swap", "other record", "gone"])
def test_wrong_bytes_are_a_miss(make: Callable[..., Replica], server: MemoryServer, how: str) -> None:
    """Whatever the store gives that is not the chunk's own frame is a miss, and is deleted unless it is gone."""
    a, b = make("a"), make("b")
    chunks = chain("text", 2)
    a.store(chunks)
    assert b.ask(chunks) == [True, True]
    key, other = chunks[0].key, chunks[1].key
    name, another = server.objects[key], server.data[server.objects[other]]
    data = server.data.pop(name)
    flipped = bytearray(data)
    flipped[PREAMBLE_BYTES + (20 if how == "flip header" else 5000)] ^= 1
    if how != "gone":
        server.data[name] = {
            "cut": data[:-1],
            "swap": data[:PREAMBLE_BYTES] + another[PREAMBLE_BYTES:],
            "other record": another,
        }.get(how, bytes(flipped))
    is_gone = how in ("cut", "other record", "gone")
    assert b.load(key) is (Fault.GONE if is_gone else Fault.CORRUPT)
    assert not b.tier.lookup(key)
    assert b.load(other) == content(other, SIZE)
    b.turn()
    assert is_gone or key not in server.objects


def test_a_record_of_another_chunk_is_not_found(make: Callable[..., Replica], server: MemoryServer) -> None:
    """Records that lie under a wrong key, of another namespace or of another parent are no answer."""
    server.evicts = False  # so that all lives are the same
    a, b = make("a"), make("b")
    one, two = chain("one", 1)[0], chain("two", 1)[0]
    a.store([one, two])
    server.data[server.objects[one.key]] = server.data[server.objects[two.key]]
    assert b.ask([one]) == [False]
    assert b.ask([Chunk(two.key, one.key, two.index)]) == [False]
    other = make("c", namespace=bytes(32))
    assert other.ask([two]) == [False]


def test_nothing_stands_behind_a_gap(make: Callable[..., Replica], server: MemoryServer) -> None:
    """Where an ancestor is gone from the store, what stands on it is not known; it is when the ancestor is back."""
    a, b, c = make("a"), make("b"), make("c")
    chunks = chain("text", 3)
    a.store(chunks)
    del server.data[server.objects[chunks[1].key]]
    assert b.ask(chunks) == [True, False, False]
    assert b.store([chunks[1]]) == [None]
    assert c.ask(chunks) == [True, True, True]


# -- forgetting ----------------------------------------------------------------------------------------------------


def test_an_invalidation_binds_every_replica(make: Callable[..., Replica]) -> None:
    """What one replica invalidates is gone for who knew it and for who asks later, with what stands on it."""
    a, b = make("a"), make("b")
    chunks = chain("text", 3)
    a.store(chunks[:1])
    a.store(chunks[1:], Terms(labels=frozenset({7})))
    assert b.ask(chunks) == [True] * 3
    assert a.invalidate(labels=frozenset({7}))
    assert [a.tier.lookup(chunk.key) for chunk in chunks[1:]] == [False, False]
    assert b.poll() == [Scope(labels=frozenset({7}))] and a.poll() == []
    assert not any(b.tier.lookup(chunk.key) for chunk in chunks)
    assert b.ask(chunks) == [True, False, False]
    assert make("c").ask(chunks) == [True, False, False]


def test_a_store_in_flight_brings_nothing_back(make: Callable[..., Replica]) -> None:
    """What a replica stores that has not read the invalidation yet is not found by anybody who has."""
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    assert b.invalidate(keys=frozenset({chunk.key}))
    a.store([chunk])  # a has not polled
    assert b.ask([chunk]) == [False]
    a.poll()
    a.turn()
    assert not a.tier.lookup(chunk.key)
    assert a.store([chunk], version=1) == [None], "what is dead gives way to what is stored anew"
    b.clock.advance(11)
    b.poll()
    assert b.ask([chunk]) == [True]
    assert b.load(chunk.key) == content(chunk.key, SIZE, 1)


@pytest.mark.parametrize("is_tagged", [False, True], ids=["by key", "by the tag of a hit"])
def test_what_stood_on_an_invalidated_chunk_does_not_come_back_with_it(
    make: Callable[..., Replica], is_tagged: bool
) -> None:
    """A text's chunk is invalidated, and stored anew without the tag: what others had stored behind it stays gone."""
    a, b = make("a"), make("b")
    chunks = chain("text", 3)
    a.store(chunks)
    if is_tagged:
        a.tier.join(chunks[0].key, Terms(labels=frozenset({9})))
        a.turn()
    assert b.invalidate(**{"labels": frozenset({9})} if is_tagged else {"keys": frozenset({chunks[0].key})})
    assert b.ask(chunks[:1]) == [False]
    assert b.store(chunks[:1]) == [None]
    assert make("c").ask(chunks) == [True, False, False]


def test_a_hit_adds_its_tags_everywhere(make: Callable[..., Replica]) -> None:
    """A replica's request hits a chunk under a tag: from then on the tag takes the chunk, wherever it was stored."""
    a, b = make("a"), make("b")
    chunks = chain("text", 2)
    a.store(chunks)
    assert b.ask(chunks) == [True, True]
    b.tier.join(chunks[0].key, Terms(labels=frozenset({9})))
    b.turn()
    assert make("c").ask(chunks) == [True, True]
    assert a.invalidate(labels=frozenset({9}))
    assert make("d").ask(chunks) == [False, False]


@pytest.mark.parametrize("is_stored_late", [False, True])
def test_a_hit_of_another_copy_brings_back_nothing(make: Callable[..., Replica], is_stored_late: bool) -> None:
    """A replica hits its own copy of a chunk whose object was invalidated: the tag does not make the object younger.

    Nor one that a replica stores which has not read the invalidation.
    """
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    if not is_stored_late:
        a.store([chunk], Terms(labels=frozenset({8})))
    assert b.invalidate(labels=frozenset({8}))
    b.tier.join(chunk.key, Terms(labels=frozenset({9})))
    b.turn()
    if is_stored_late:
        a.store([chunk], Terms(labels=frozenset({8})))
    assert make("c").ask([chunk]) == [False]


def test_a_tag_counts_for_what_lies_behind_a_gap(make: Callable[..., Replica], server: MemoryServer) -> None:
    """A request used chunks whose root L2 had lost: when somebody stores the root again, its tag still takes them."""
    one, two, three = make("one"), make("two"), make("three")
    text = chain("text", 3)
    two.store(text, Terms(labels=frozenset([1])))
    del server.data[server.objects[text[0].key]]
    assert one.ask(text) == [False] * 3
    for chunk in text:
        one.tier.join(chunk.key, Terms(labels=frozenset([7])))
    one.turn()
    two.clock.advance(11)
    three.poll()
    three.store(text[:1], Terms(labels=frozenset([1])))
    assert one.invalidate(labels=frozenset([7]))
    for replica in (one, two):
        replica.poll()
        replica.tier.finished()
        assert replica.ask(text)[1:] == [False, False]


def test_tags_of_a_new_text_are_one_update(make: Callable[..., Replica], server: MemoryServer) -> None:
    """What is nowhere yet gets its tags from who stores it: only where it would begin they are written down before."""
    one, text = make(), chain("text", 50)
    assert one.ask(text) == [False] * 50
    for chunk in text:
        one.tier.join(chunk.key, Terms(labels=frozenset([7])))
    one.turn()
    assert server.updated == {text[0].key}


def test_the_store_is_measured_once_at_a_time(
    make: Callable[..., Replica], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it still counts what it has, nobody asks it to begin again; then it is asked anew."""
    asked: list[int] = []
    monkeypatch.setattr(server, "usage", lambda: (asked.append(1), StoreUsage())[1])
    one = make()
    for _ in range(5):
        one.tier.finished()
        one.clock.advance(6)
    one.queues.run()
    assert len(asked) == 1
    one.tier.finished()
    one.queues.run()
    assert len(asked) == 2


def test_a_tag_that_came_later_than_an_invalidation_counts_from_then_on(make: Callable[..., Replica]) -> None:
    """A chunk outlived an invalidation of a tag that it got only afterwards; the next one takes it."""
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    a.store([chunk])
    assert a.invalidate(labels=frozenset({9}))
    b.poll()
    assert b.ask([chunk]) == [True]
    b.tier.join(chunk.key, Terms(labels=frozenset({9})))
    b.turn()
    assert make("c").ask([chunk]) == [True]
    assert a.invalidate(labels=frozenset({9}))
    assert make("d").ask([chunk]) == [False]


def test_updates_that_failed_are_written_later(make: Callable[..., Replica], server: MemoryServer) -> None:
    """A tag that could not be written when a request hit the chunk is written when the store is back."""
    a = make("a")
    (chunk,) = chain("text", 1)
    a.store([chunk])

    def fail(call: str) -> None:
        if call == "append metadata":
            raise ConnectionError("gone")

    server.before = fail
    a.tier.join(chunk.key, Terms(labels=frozenset({9})))
    a.turn()
    assert chunk.key not in server.updated
    server.before = lambda call: None
    a.turn()
    b = make("b")
    assert b.ask([chunk]) == [True]
    assert b.tier.terms(chunk.key).labels == {9}


ANNA, BERT = Terms(tenant=1), Terms(tenant=2)


def test_an_invalidation_drops_what_it_may_take_and_no_more(make: Callable[..., Replica]) -> None:
    """Of other tenants everything stays known, here and at every replica, before it is logged and after."""
    a, b = make("a"), make("b")
    hers, his = chain("hers", 2), chain("his", 2)
    a.store(hers, ANNA)
    a.store(his, BERT)
    assert b.ask(hers) == [True, True] and b.ask(his) == [True, True]
    told: list[bool] = []
    a.tier.invalidate([Scope(tenant=1, keys=frozenset({hers[1].key})), Scope(tenant=3)], told.append)
    assert not told and all(a.tier.lookup(chunk.key) for chunk in his)
    assert not any(a.tier.lookup(chunk.key) for chunk in hers)
    a.turn()
    assert told == [True] and b.follower.poll()
    assert all(b.tier.lookup(chunk.key) for chunk in his), "nobody invalidated anything of his"
    assert not any(b.tier.lookup(chunk.key) for chunk in hers)
    assert b.ask(hers) == [True, False]


def test_an_answer_is_believed_unless_its_tenant_was_invalidated_meanwhile(make: Callable[..., Replica]) -> None:
    """What was asked before another tenant's invalidation is known when the answer comes; the tenant's own is not."""
    a, b = make("a"), make("b")
    hers, his = chain("hers", 2), chain("his", 2)
    a.store(hers, ANNA)
    a.store(his, BERT)
    b.tier.ask(hers, 1)
    b.tier.ask(his, 2)
    a.invalidate(tenant=1, labels=frozenset({9}))
    b.follower.poll()
    b.turn()
    assert all(b.tier.lookup(chunk.key) for chunk in his)
    assert not any(b.tier.lookup(chunk.key) for chunk in hers)


def test_other_tenants_are_stored_while_one_invalidates(make: Callable[..., Replica]) -> None:
    """Only what an invalidation on its way to the log takes is held back; what is stored is known at once."""
    a = make("a")
    hers, his = chain("hers", 2), chain("his", 2)
    log = a.queues.all[1]
    assert log.name == "l2-log"
    log.hung = True
    a.tier.invalidate([Scope(tenant=1, keys=frozenset({hers[0].key}))], lambda done: None)
    assert a.tier.can_store()
    assert a.tier.holds_back(hers[0].key, ANNA) and not a.tier.holds_back(hers[1].key, ANNA)
    assert not a.tier.submit_store(hers[0], ANNA, aligned(SIZE))
    assert a.store(his, BERT) == [None, None]
    assert all(a.tier.lookup(chunk.key) for chunk in his)
    log.hung = False
    a.turn()
    a.poll()
    assert not a.tier.holds_back(hers[0].key, ANNA)
    assert a.store(hers, ANNA) == [None, None] and make("b").ask(hers) == [True, True]


def test_invalidations_that_wait_are_one_entry(make: Callable[..., Replica], server: MemoryServer) -> None:
    """While the log is busy what comes is gathered, and written as one entry; each is told once."""
    a, b = make("a"), make("b")
    log, told = a.queues.all[1], list[bool]()
    log.hung = True
    for number in range(2000):
        a.tier.invalidate([Scope(tenant=1, labels=frozenset([number + 1]))], told.append)
    log.hung = False
    a.turn()
    assert told == [True] * 2000 and len(server.entries) <= 2
    assert sum(len(entry.scopes) for entry in server.entries) == 2000
    assert b.poll() == [Scope(tenant=1)], "more than an engine is told one by one"


def test_a_parent_that_was_stored_anew_keeps_its_children_while_others_invalidate(
    make: Callable[..., Replica], server: MemoryServer
) -> None:
    """The store lost a chunk, which was stored again after another tenant's invalidation: its children are alive."""
    a, b = make("a"), make("b")
    chunks = chain("his", 3)
    a.store(chunks, BERT)
    del server.data[server.objects[chunks[0].key]]
    a.invalidate(tenant=1)
    a.poll()
    b.poll()
    assert b.ask(chunks) == [False] * 3
    assert b.store(chunks[:1], BERT) == [None]
    assert make("c").ask(chunks) == [True] * 3
    a.invalidate(tenant=2, labels=frozenset({9}))
    assert make("d").ask(chunks) == [True, False, False], "it may have been taken with what it stood on"


def test_too_many_updates_forget_who_has_most(
    make: Callable[..., Replica], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are more tags than can be remembered, all of one tenant is invalidated, and others' tags count."""
    monkeypatch.setattr(follower, "_MAX_UPDATES", 4)
    a = make("a")
    hers, his = chain("hers", 5), chain("his", 2)
    a.store(hers, ANNA)
    a.store(his, BERT)
    for chunk in [*his, *hers]:
        terms = BERT if chunk in his else ANNA
        a.tier.join(chunk.key, terms.joined(Terms(labels=frozenset({9}))))
        assert len(a.follower.updates) <= 4
    a.turn()
    a.poll()
    assert [entry.scopes for entry in server.entries] == [(Scope(tenant=1),)]
    b = make("b")
    assert b.ask(hers) == [False] * 5 and b.ask(his) == [True, True]
    assert all(b.tier.terms(chunk.key).labels == {9} for chunk in his)


def test_what_is_known_is_bounded(make: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more chunks than it remembers a replica knows the latest, likewise of absent ones; it asks for the rest."""
    monkeypatch.setattr(remote, "_MAX_KNOWN", 10)
    a, b = make("a"), make("b")
    chunks, absent = [chain(f"text {n}", 1)[0] for n in range(25)], [chain(f"absent {n}", 1)[0] for n in range(25)]
    for first in range(0, 25, 5):
        a.store(chunks[first : first + 5])
    for chunk in chunks:
        assert b.ask([chunk]) == [True]
        b.tier.check()
    assert [b.tier.lookup(chunk.key) for chunk in chunks] == [False] * 15 + [True] * 10
    assert b.ask(chunks[:1]) == [True] and not b.tier.lookup(chunks[15].key)
    for chunk in absent:
        assert b.ask([chunk]) == [False]
    assert len(b.tier._known._absent) == 10 and len(b.tier._known._gaps) <= 10


def test_time_runs_out(make: Callable[..., Replica]) -> None:
    """A chunk is a miss from its expiry on, for who knew it, for who asks, and for who loads it just then."""
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    a.store([chunk], Terms(expires_s=int(a.clock.unix()) + 30))
    assert b.ask([chunk]) == [True]
    into = aligned(SIZE)
    assert b.tier.submit_load(chunk.key, into)
    a.clock.advance(31)
    a.poll()
    b.poll()
    assert [transfer.fault for transfer in b.turn()] == [Fault.GONE]
    assert not a.tier.lookup(chunk.key) and not b.tier.lookup(chunk.key)
    assert make("c").ask([chunk]) == [False]


def test_who_cannot_read_the_log_reads_nothing(make: Callable[..., Replica], server: MemoryServer) -> None:
    """Without the log for some seconds a replica knows nothing and stores nothing; with it, it goes on."""
    a = make("a")
    chunks = chain("text", 2)
    a.store(chunks)

    def fail(call: str) -> None:
        if call in ("read log", "read epochs"):
            raise TimeoutError("no answer")

    server.before = fail
    a.clock.advance(STALE_S + 0.1)
    assert not a.follower.poll()
    assert not any(a.tier.lookup(chunk.key) for chunk in chunks) and not a.tier.can_store()
    server.before = lambda call: None
    a.poll()
    assert a.ask(chunks) == [True, True]


def test_a_log_that_was_lost_forgets_everything(make: Callable[..., Replica], server: MemoryServer) -> None:
    """When the store began anew, or trimmed what was not read yet, the engine is told to forget everything."""
    a = make("a")
    (chunk,) = chain("text", 1)
    a.store([chunk])
    server.data.clear()
    assert a.poll() == [Scope()]
    assert a.ask([chunk]) == [False]
    assert a.store([chunk]) == [None]
    other = server.log(log_entries=4)
    for _ in range(6):
        other.append([Scope(tenant=9)], "other")
    assert a.poll()[0] == Scope()
    assert a.ask([chunk]) == [False], "it is older than all that the log can judge"


def test_an_invalidation_that_is_not_logged_is_not_acknowledged(
    make: Callable[..., Replica], server: MemoryServer
) -> None:
    """Where the log takes no entry, the answer is that it is not durable."""

    def fail(call: str) -> None:
        if call == "create log":
            raise ConnectionError("gone")

    a = make("a")
    server.before = fail
    assert a.invalidate() is False


def test_what_was_computed_before_an_invalidation_is_not_stored_after_it(make: Callable[..., Replica]) -> None:
    """A replica has read an invalidation and not applied it yet: what it stores meanwhile is from before, and dead."""
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    assert a.invalidate(keys=frozenset({chunk.key}))
    b.follower.poll()
    b.store([chunk])
    assert make("c").ask([chunk]) == [False]
    assert b.follower.foreign() != []


def test_tags_that_come_all_the_time_hold_up_no_receipt(make: Callable[..., Replica]) -> None:
    """A tag of a hit after an invalidation was applied does not count for it, and need not be written before it."""
    a, b = make("a"), make("b")
    (chunk,) = chain("text", 1)
    a.store([chunk])
    assert b.ask([chunk]) == [True]
    b.tier.join(chunk.key, Terms(labels=frozenset({9})))
    assert a.invalidate(labels=frozenset({9}))
    b.poll()
    for number in range(10, 13):  # the one that counts is written, while others keep coming
        b.tier.join(chain("text", 2)[1].key, Terms(labels=frozenset({number})))
        b.poll()
        assert b.follower.updates and missing(a.follower) == (["b"] if number == 10 else [])
        b.tier._submit_updates(at_most=1)
        b.queues.run()
        b.tier.finished()


def test_the_receipt_names_who_has_read(make: Callable[..., Replica], server: MemoryServer) -> None:
    """Replicas that read the invalidation are named, and those that are alive and did not are missing."""
    a, b, _ = make("a"), make("b"), make("c")
    assert a.invalidate(labels=frozenset({1}))
    b.poll()
    assert sorted(a.follower.readers()) == ["a", "b", "c"] and missing(a.follower) == ["c"]


def test_replicas_of_a_store_without_a_log_judge_each_other_by_time(server: MemoryServer) -> None:
    """What was stored since a replica began is a hit for it, and what it invalidates is none, whoever stored either."""
    a, before, by_a, by_b = Replica(server, "a", has_log=False), *(chain(name, 1) for name in "xyz")
    terms = Terms(labels=frozenset([7]))

    def stored(replica: Replica, chunks: list[Chunk]) -> None:
        server.clock.advance(11)  # type: ignore[attr-defined]
        replica.poll()
        assert replica.store(chunks, terms) == [None]

    stored(a, before)
    server.clock.advance(1)  # type: ignore[attr-defined]
    b = Replica(server, "b", has_log=False)
    stored(a, by_a)
    stored(b, by_b)
    a.poll()
    assert [b.ask(chunks) for chunks in (before, by_a, by_b)] == [[False], [True], [True]]
    assert [a.ask(chunks) for chunks in (before, by_a, by_b)] == [[True]] * 3
    server.clock.advance(1)  # type: ignore[attr-defined]
    assert a.invalidate(labels=frozenset([7]))
    assert [a.ask(chunks) for chunks in (before, by_a, by_b)] == [[False]] * 3
    stored(a, chain("new", 1))
    b.poll()
    assert b.ask(chain("new", 1)) == [True]


def test_following_an_idle_log_costs_no_memory() -> None:
    """A log whose generations go on by the clock leaves nothing behind while nothing is invalidated."""
    clock = SimulatedClock()
    log = VolatileLog(clock)
    follower, began = LogFollower(log, "a", clock), log.read(0).floor
    for _ in range(100):
        clock.advance(0.1)
        follower.poll()
    assert not follower._queued
    assert follower.foreign() == [] and follower.applied == follower.generation > began


@pytest.mark.parametrize("back_s", [0.0, 3600.0], ids=["at once", "a clock set back"])
def test_an_entry_of_ones_own_log_comes_behind_what_was_told(back_s: float) -> None:
    """Whoever was told how far the log is reads every later entry, whatever the clock says meanwhile, and it takes what
    was stored at a generation that was told."""
    clock = SimulatedClock()
    log = VolatileLog(clock)
    follower = LogFollower(log, "a", clock)
    assert follower.poll()
    told = follower.generation
    clock.unix = lambda: 1_700_000_000 - back_s  # type: ignore[method-assign]
    for number in (1, 2):
        scope = Scope(labels=frozenset([number]))
        assert log.append([scope], "other") > told
        assert follower.poll() and follower.foreign() == [scope]
        assert told < follower.view.matched_at(ChunkKey(bytes(32)), NAMESPACE, Terms(labels=scope.labels))
        assert log.read(told + 3_600_000).generation == told + 3_600_000  # somebody else's place is told, too
        told = max(follower.generation, told + 3_600_000)


def test_a_log_of_ones_own_keeps_the_newest_entries() -> None:
    """It does not grow for ever; who reads on misses nothing, and who comes too late knows that it did."""
    clock = SimulatedClock()
    log = VolatileLog(clock)
    follower, late = (LogFollower(log, name, clock) for name in "ab")
    late.poll()
    clock.advance(1)
    heard: list[Scope] = []
    for number in range(10_000):
        log.append([Scope(labels=frozenset([number + 1]))], "other")
        if number % 50 == 49:
            follower.poll()
            heard += follower.foreign()
    assert len(log._entries) < 5000
    assert heard == [Scope(labels=frozenset([number + 1])) for number in range(10_000)]
    late.poll()
    assert late.foreign()[0] == Scope()


# -- faults --------------------------------------------------------------------------------------------------------


def test_an_object_that_can_not_be_read_costs_its_chunk(make: Callable[..., Replica], server: MemoryServer) -> None:
    """One object fails whenever it is read, and the store works for all others: it is tried once in ten seconds, and
    however many requests ask for its text, and for nothing else, the tier is not given up. It is a hit once it is well.
    """
    a, b = make("a"), make("b")
    chunks = chain("text", 4)
    a.store(chunks)
    bad = chunks[2].key
    name, read_into = server.objects[bad], server.read_into
    tried: list[str] = []

    def failing(asked: str, into: Sequence[memoryview]) -> bool:
        if asked != name:
            return read_into(asked, into)
        tried.append(asked)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    server.read_into = failing  # type: ignore[method-assign]
    lower = SettledTier(lambda again: b.tier, b.clock)
    into = aligned(SIZE)

    def loaded(wanted: list[Chunk]) -> list[bool]:
        """Which of these a request for the text gets."""
        b.tier.ask(chunks, 0)
        b.queues.run()
        assert not lower.finished()
        there = [lower.submit_load(chunk.key, into) for chunk in wanted]
        b.queues.run()
        good = {transfer.key for transfer in lower.finished() if transfer.fault is None}
        return [is_there and chunk.key in good for is_there, chunk in zip(there, wanted, strict=True)]

    for turn in range(1, 7):
        wanted = chunks if turn < 3 else chunks[2:3]  # RAM has the others from then on: nothing else is loaded
        for _ in range(5):
            assert loaded(wanted) == [chunk.key != bad for chunk in wanted]
        assert len(tried) == turn and lower.trips == 0 and lower.is_up
        b.clock.advance(11.0)
        b.poll()
    server.read_into = read_into  # type: ignore[method-assign]
    assert loaded(chunks) == [True] * 4


@pytest.mark.parametrize(
    "failing", ["read objects", "read_into objects", "create objects", "create metadata", "delete objects", "usage"]
)
def test_a_store_that_fails_costs_a_miss(make: Callable[..., Replica], server: MemoryServer, failing: str) -> None:
    """Each call may fail: what it was for is a miss or not stored, nothing else happens, and all works afterwards."""
    a, b = make("a"), make("b")
    chunks = chain("text", 2)
    a.store(chunks[:1])
    b.ask(chunks)

    def fail(call: str) -> None:
        if call == failing:
            raise ConnectionResetError("gone")

    server.before = fail
    b.clock.advance(6)
    b.poll()
    assert b.load(chunks[0].key) == (Fault.IO if failing.startswith("read_into") else content(chunks[0].key, SIZE))
    fault = Fault.IO if failing.startswith(("read ", "create")) else None
    assert b.store(chunks[1:]) == [fault]
    b.tier.discard(chunks[1].key)
    b.turn()
    server.before = lambda call: None
    b.clock.advance(11)
    b.poll()
    b.ask(chunks)
    assert b.load(chunks[0].key) == content(chunks[0].key, SIZE)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EMLINK, errno.EBUSY])
def test_a_store_that_says_no_is_no_fault(make: Callable[..., Replica], server: MemoryServer, number: int) -> None:
    """A store without room, or that refuses for another reason, takes no chunk, and is not taken for a broken one."""

    def fail(call: str) -> None:
        if call == "create objects":
            raise OSError(number, "no")

    server.before = fail
    a, (chunk,) = make("a"), chain("text", 1)
    assert a.store([chunk]) == [Fault.DROPPED]


def test_dropped_jobs_are_reported(make: Callable[..., Replica]) -> None:
    """A tier that is given up reports what had not begun as dropped, answers included."""
    a = make("a")
    texts = [chain(str(n), 1)[0] for n in range(12)]
    for chunk in texts:
        a.tier.submit_store(chunk, Terms(), aligned(SIZE))
    a.tier.ask(chain("other", 3), 0)
    a.tier.give_up()
    faults = [transfer.fault for transfer in a.turn()]
    assert len(faults) == 12 and Fault.DROPPED in faults
    assert a.tier.asking == 0


def test_a_discarded_store_does_not_appear(make: Callable[..., Replica], server: MemoryServer) -> None:
    """A chunk that is discarded while it is written is deleted when it was."""
    a = make("a")
    (chunk,) = chain("text", 1)
    assert a.tier.submit_store(chunk, Terms(), aligned(SIZE, os.urandom(SIZE)))
    a.tier.discard(chunk.key)
    a.turn()
    assert not a.tier.lookup(chunk.key) and chunk.key not in server.objects


def test_records_say_what_the_chunk_is(make: Callable[..., Replica], server: MemoryServer) -> None:
    """The record beside a frame names the chunk, its parent, place, namespace, size and terms."""
    a = make("a")
    chunks = chain("text", 2)
    a.store(chunks, Terms(tenant=5, labels=frozenset({1, 2})))
    record = unpack(server.data[server.objects[chunks[1].key]][:RECORD_BYTES])
    assert record is not None
    assert (record.key, record.parent, record.place) == (chunks[1].key, chunks[0].key, 1)
    assert (record.namespace, record.payload_bytes) == (NAMESPACE, SIZE)
    assert (record.terms.tenant, record.terms.labels) == (5, {1, 2})


def test_wrong_sizes_are_the_callers_bug(make: Callable[..., Replica]) -> None:
    """Buffers of another size raise ValueError."""
    a = make("a")
    (chunk,) = chain("text", 1)
    with pytest.raises(ValueError):
        a.tier.submit_store(chunk, Terms(), aligned(SIZE + 4096))
    with pytest.raises(ValueError):
        a.tier.submit_load(chunk.key, aligned(SIZE - 4096))


def test_many_updates_go_in_batches(
    make: Callable[..., Replica], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call of the store carries more than a few hundred keys, and all that was hit is updated in the end."""
    counts: list[int] = []
    update = BlobStore.add_updates

    def counted(store: BlobStore, updates: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        counts.append(len(updates))
        update(store, updates)

    monkeypatch.setattr(BlobStore, "add_updates", counted)
    a = make("a")
    for chunk in chain("text", 600):
        a.tier.join(chunk.key, Terms(labels=frozenset({9})))
    for _ in range(3):
        a.turn()
    assert len(server.updated) == 600 == sum(counts) and max(counts) <= 256


def test_a_chunk_that_cannot_be_updated_holds_up_no_other(
    make: Callable[..., Replica], server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates of all others are written; in the end the chunk is invalidated, and receipts wait for it no more."""
    a, b = make("a"), make("b")
    chunks = chain("text", 12)
    bad = chunks[7].key
    a.store(chunks)
    update = BlobStore.add_updates

    def fails(store: BlobStore, updates: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        if bad in updates:
            raise OSError("the metadata of one chunk can't be written")
        update(store, updates)

    monkeypatch.setattr(BlobStore, "add_updates", fails)
    for chunk in chunks:
        a.tier.join(chunk.key, Terms(labels=frozenset({9})))
    for _ in range(20):
        a.turn()
    assert len(server.updated) == 11 and list(a.follower.updates.oldest(None)) == [bad]
    assert b.invalidate(labels=frozenset({5}))
    a.poll()
    assert missing(b.follower) == ["a"]  # what it has not written may concern the tag that was invalidated
    server.clock.advance(11)
    a.poll()
    a.tier.finished()
    a.queues.run()  # the updates fail, the chunk is invalidated, and the log's thread says so
    a.tier.finished()
    a.queues.run()
    assert a.follower.updates  # which only the scheduler's thread changes
    a.turn()
    a.poll()
    assert not a.follower.updates and missing(b.follower) == []
    b.poll()
    assert b.ask(chunks) == [True] * 7 + [False] * 5


@pytest.mark.parametrize("wrong", [0, 700_000, 1 << 20, (2 << 20) + 5])
def test_segments_are_verified_where_they_land(wrong: int) -> None:
    """A wrong byte in any segment of a frame, also one that was right when it first landed, makes it no hit."""
    payload = aligned((2 << 20) + 4096, bytes(range(256)) * (((2 << 20) + 4096) // 256))
    header, identity = memoryview(bytearray(HEADER_BYTES)), FrameIdentity(ChunkKey(bytes(32)), NAMESPACE)
    seal(header, payload, identity)
    parts = [(first, stop) for _, first, stop in segments(len(payload))]
    checked = Checked(header, payload)
    for first, stop in parts:
        checked.landed(first, payload[first:stop])
    assert checked.fault(identity, 0.0) is None
    payload[wrong] ^= 1
    for first, stop in parts:
        checked.landed(first, payload[first:stop])
    assert checked.fault(identity, 0.0) is FrameFault.PAYLOAD
    assert Checked(header, payload).fault(identity, 0.0) is FrameFault.PAYLOAD, "what nobody told of is verified whole"
    assert Checked(header, payload).fault(FrameIdentity(ChunkKey(b"2" * 32), NAMESPACE), 0.0) is FrameFault.KEY
