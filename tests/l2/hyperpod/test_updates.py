"""Updates on a store whose objects never change: none is lost, and what can't be read is a miss."""

import errno
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from hotspan.core.terms import MAX_LABELS, Terms
from hotspan.l2.base import updates_of
from hotspan.l2.hyperpod import MAX_NUMBERS, HyperpodStore, _packed
from hotspan.l2.hyperpod_daemon import HyperpodDaemon
from hotspan.testing.chunks import chain, key_of
from tests.daemon_protocol.client import eventually
from tests.daemon_protocol.peer import Handler, Peer
from tests.l2.hyperpod.broken_answers import ANSWERS, status
from tests.l2.hyperpod.rig import SLACK_S, TIMEOUT_S, Object, found_in, there


def beside(one: Object, n: int) -> str:
    """The name of an object's metadata."""
    return f"{one.key.hex()}.m{n}"


class TestMarks:
    LABELS = tuple(range(1000, 1000 + MAX_LABELS + 30))

    def add_updates(self, store: HyperpodStore, one: Object, generation: int = 5, **terms: Any) -> None:
        """Add updates for a request under such terms."""
        store.add_updates({one.key: updates_of(Terms(**terms), generation)})

    def test_a_update_that_is_covered_is_not_written(self, peer: Peer, store: HyperpodStore) -> None:
        """Saying again what a chain says puts nothing."""
        one = Object()
        self.add_updates(store, one, labels=frozenset([2, 3]), expires_s=100)
        before = peer.names()
        for _ in range(3):
            self.add_updates(store, one, 9, labels=frozenset([3]), expires_s=200)
        assert peer.names() == before == [beside(one, 0)]

    def test_no_updates_are_no_question(self, peer: Peer, store: HyperpodStore) -> None:
        """Marking nothing, or with nothing, puts nothing."""
        store.add_updates({})
        store.add_updates({key_of("a"): []})
        assert not peer.names()

    def test_writers_at_once_lose_nothing(self, make: Callable[..., HyperpodStore]) -> None:
        """Replicas that update a chunk at the same time all succeed, and every update is there."""
        stores = [make() for _ in range(4)]
        one = Object()
        one.put(stores[0])
        failed: list[BaseException] = []

        def write(number: int) -> None:
            try:
                for label in range(6):
                    self.add_updates(stores[number], one, labels=frozenset([100 * (number + 1) + label]))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        labels = {100 * (number + 1) + label for number in range(4) for label in range(6)}
        assert there(stores[0], one.key).terms.labels == labels

    def test_every_number_of_updates_is_read_whole(
        self, store: HyperpodStore, make: Callable[..., HyperpodStore]
    ) -> None:
        """After each of many updates a reader has all labels so far, or knows that it is wild."""
        one = Object()
        one.put(store)
        reader = make()
        for count, label in enumerate(self.LABELS, 1):
            self.add_updates(store, one, labels=frozenset([label]))
            terms = there(reader, one.key).terms
            assert terms.is_wild or terms.labels == set(self.LABELS[:count])
        assert terms.is_wild

    def test_more_labels_at_once_than_a_chunk_can_have(self, store: HyperpodStore) -> None:
        """A request with more labels than fit makes the chunk wild; its expiry is kept."""
        one = Object()
        one.put(store)
        self.add_updates(store, one, labels=frozenset(self.LABELS), expires_s=77)
        terms = there(store, one.key).terms
        assert terms.is_wild and terms.expires_s == 77

    def test_a_chunk_with_many_labels_still_takes_expiries(self, store: HyperpodStore) -> None:
        """After labels without end there is room for earlier expiries, and never more than MAX_NUMBERS objects."""
        one = Object()
        one.put(store)
        for label in self.LABELS:
            self.add_updates(store, one, labels=frozenset([label]))
        for expires_s in (5000, 4000, 3000):
            self.add_updates(store, one, expires_s=expires_s)
        terms = there(store, one.key).terms
        assert terms.is_wild and terms.expires_s == 3000

    def test_a_full_chain_is_over_and_covers_all(self, peer: Peer, store: HyperpodStore) -> None:
        """With MAX_NUMBERS of them a chunk is wild and expired: a hit's update is never refused, and so never waits.

        An update that waits would keep a replica from saying how far it has read, for every tenant.
        """
        one = Object()
        one.put(store)
        for number in range(MAX_NUMBERS):
            self.add_updates(store, one, expires_s=10_000 - number)
        assert beside(one, MAX_NUMBERS - 1) in peer.names()
        self.add_updates(store, one, labels=frozenset([1]))
        for expires_s in (10_000, 10, 1):
            self.add_updates(store, one, expires_s=expires_s)
        terms = there(store, one.key).terms
        assert terms.is_wild and terms.expires_s == 1
        assert len(peer.names()) == MAX_NUMBERS + 1

    def test_a_chain_filled_by_others_is_wild(self, store: HyperpodStore) -> None:
        """With MAX_NUMBERS objects in its chain a chunk is wild, though none of them says so."""
        one = Object()
        one.put(store)
        updates = frozenset(updates_of(Terms(labels=frozenset([5])), 4))
        for number in range(MAX_NUMBERS - 1):
            store.blobs.daemon.put(beside(one, number), [_packed(one.key.hex(), number, updates)])
        assert there(store, one.key).terms.labels == {5}
        store.blobs.daemon.put(beside(one, MAX_NUMBERS - 1), [_packed(one.key.hex(), MAX_NUMBERS - 1, updates)])
        assert there(store, one.key).terms.is_wild

    def test_a_chain_costs_few_questions(self, peer: Peer, store: HyperpodStore) -> None:
        """A chunk without updates costs one question more, one with dozens of them a dozen."""
        one, two = Object("a"), Object("b")
        one.put(store), two.put(store)
        for label in range(40):
            self.add_updates(store, two, labels=frozenset([label + 1]))
        for object_, most in ((one, 2), (two, 14)):
            before = peer.asked["lease"]
            there(store, object_.key)
            assert peer.asked["lease"] - before <= most

    def test_a_update_that_can_not_be_read_makes_it_wild(self, store: HyperpodStore) -> None:
        """An update of another kind or length is kept as "wild"."""
        for name, update in (("a", b"?" * 17), ("b", b"short"), ("c", b"long" * 100), ("d", b"")):
            one = Object(name)
            one.put(store)
            store.add_updates({one.key: [update]})
            assert there(store, one.key).terms.is_wild

    @pytest.mark.parametrize("at", [0, 4, 6, 8, 40, 41, 49, 57, 60, 64])
    def test_a_damaged_chain_is_a_miss(self, peer: Peer, store: HyperpodStore, at: int) -> None:
        """What can't be read might forbid it: the chunk is a miss, its leases are released, and updating it fails."""
        one = Object()
        one.put(store)
        self.add_updates(store, one, expires_s=77)
        stored = peer._objects["lmcache", beside(one, 0)]
        page = stored.pages[0] * 16384
        peer._memory[page + at] ^= 1
        assert found_in(store, one.key) is None
        assert eventually(lambda: peer.leases() == 0)
        with pytest.raises(OSError):
            self.add_updates(store, one, expires_s=5)

    @pytest.mark.parametrize("is_hotspan", [False, True])
    def test_a_chunk_with_damaged_metadata_is_put_again(
        self, peer: Peer, store: HyperpodStore, is_hotspan: bool
    ) -> None:
        """Where it can be deleted; else the put is refused, and the daemon is not taken for a broken one."""
        peer.is_hotspan = is_hotspan
        one = Object()
        one.put(store)
        store.blobs.daemon.put(beside(one, 0), [b"?" * 65])
        if is_hotspan:
            assert one.put(store) and one.get(store, there(store, one.key))
            return
        with pytest.raises(OSError) as refused:
            one.put(store)
        assert refused.value.errno == errno.EBUSY and found_in(store, one.key) is None

    @pytest.mark.parametrize("is_known", [False, True])
    def test_a_hit_during_a_delete_keeps_its_tag(
        self, peer: Peer, make: Callable[..., HyperpodStore], monkeypatch: pytest.MonkeyPatch, is_known: bool
    ) -> None:
        """A chunk that is put anew and hit while somebody still deletes the former one has the tag of that hit.

        is_known: the former chunk had that tag, so that the hit adds nothing.
        """
        peer.is_hotspan = True
        store, other, one, delete = make(), make(), Object(), HyperpodDaemon.delete_all
        one.put(store)
        self.add_updates(store, one, labels=frozenset([2 if is_known else 1]))

        def overtaken(daemon: HyperpodDaemon, names: Any, deadline: Any) -> list[bool]:
            were = delete(daemon, names, deadline)
            monkeypatch.setattr(HyperpodDaemon, "delete_all", delete)
            assert one.put(other) and (2 in there(other, one.key).terms.labels) == is_known
            if not is_known:
                self.add_updates(other, one, labels=frozenset([2]))
            return were

        monkeypatch.setattr(HyperpodDaemon, "delete_all", overtaken)
        store.delete([one.key])
        assert 2 in there(store, one.key).terms.labels

    def test_a_delete_between_a_put_and_its_hit_leaves_no_chunk_without_its_tag(
        self, peer: Peer, make: Callable[..., HyperpodStore], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Updates older than a put may be emptied after a hit that relied on them: then the chunk goes as well."""
        peer.is_hotspan = True
        store, other, one = make(), make(), Object()
        put, delete = HyperpodDaemon.put, HyperpodDaemon.delete_all
        self.add_updates(store, one, labels=frozenset([2]))

        def put_late(daemon: HyperpodDaemon, name: str, value: Any) -> bool:
            def removed(other_daemon: HyperpodDaemon, names: Any, deadline: Any) -> list[bool]:
                were = delete(other_daemon, names, deadline)
                monkeypatch.setattr(HyperpodDaemon, "delete_all", delete)
                assert put(daemon, name, value)
                assert 2 in there(other, one.key).terms.labels
                return were

            monkeypatch.setattr(HyperpodDaemon, "put", put)
            monkeypatch.setattr(HyperpodDaemon, "delete_all", removed)
            other.delete([one.key])
            return True

        monkeypatch.setattr(HyperpodDaemon, "put", put_late)
        one.put(store)
        assert found_in(store, one.key) is None
        assert one.put(store) and not there(other, one.key).terms.labels

    @pytest.mark.parametrize(("count", "gone"), [(2, 1), (4, 1), (4, 2), (5, 3)])
    def test_a_update_above_evicted_numbers_is_found(
        self, peer: Peer, store: HyperpodStore, count: int, gone: int
    ) -> None:
        """Of former metadata the last numbers may be left: what is added since counts, whatever a reader finds."""
        one = Object()
        one.put(store)
        for label in range(count):
            self.add_updates(store, one, labels=frozenset([100 + label]))
        for name in (one.key.hex(), *(beside(one, number) for number in range(gone))):
            peer.evict(name)
        assert one.put(store)
        for label in range(1, 6):
            self.add_updates(store, one, 9, labels=frozenset([label]))
            assert there(store, one.key).terms.labels >= set(range(1, label + 1))

    def test_metadata_is_used_after_its_object(
        self, peer: Peer, store: HyperpodStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A daemon that evicts what was not used for longest takes an object before its updates, also after a load."""
        one, asked, lease = Object(), [], peer.lease
        one.put(store)
        self.add_updates(store, one, labels=frozenset([2]))
        monkeypatch.setattr(peer, "lease", lambda name, *rest: (asked.append(name[1]), lease(name, *rest))[1])
        found = there(store, one.key)
        assert asked.index(one.key.hex()) < asked.index(beside(one, 0))
        asked.clear()
        assert one.get(store, found) and asked[:2] == [one.key.hex(), beside(one, 0)]

    def test_full_metadata_outlives_a_delete(self, peer: Peer, store: HyperpodStore) -> None:
        """Nothing can be added to it: a tag of a hit that comes during the delete counts because the chunk is wild."""
        peer.is_hotspan = True
        one = Object()
        one.put(store)
        for number in range(MAX_NUMBERS):
            self.add_updates(store, one, expires_s=10_000_000_000 - number)
        store.delete([one.key])
        assert found_in(store, one.key) is None and one.put(store)
        self.add_updates(store, one, labels=frozenset([1]))
        assert there(store, one.key).terms.is_wild

    def test_a_damaged_chain_ends_what_is_found(self, peer: Peer, store: HyperpodStore) -> None:
        """Of a text whose second chunk has updates that can't be read, the first is found, and is itself."""
        objects = [Object(key=chunk.key, size=10 + chunk.index) for chunk in chain("text", 4)]
        for one in objects:
            one.put(store)
        store.blobs.daemon.put(beside(objects[1], 0), [b"?" * 65])
        first, second, *_ = store.find([one.key for one in objects])
        assert first is not None and second is None
        assert objects[0].get(store, first)
        assert eventually(lambda: peer.leases() == 0)

    def test_a_huge_object_in_a_chains_place_is_not_read(self, store: HyperpodStore) -> None:
        """What is longer than any chain can be is a miss without being copied."""
        one = Object()
        one.put(store)
        store.blobs.daemon.put(beside(one, 0), [bytes(8 << 20)])
        tracemalloc.start()
        try:
            assert found_in(store, one.key) is None
            assert tracemalloc.get_traced_memory()[1] < 4 << 20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("size", [0, 1, 48, 64, 66, 5000])
    def test_a_chain_of_something_else_is_a_miss(self, store: HyperpodStore, size: int) -> None:
        """An object in the chain's place that is no update, of any length, makes the chunk a miss."""
        one = Object()
        one.put(store)
        store.blobs.daemon.put(beside(one, 0), [bytes(size)])
        if size:
            assert found_in(store, one.key) is None

    def test_another_chunks_updates_are_not_this_ones(self, peer: Peer, store: HyperpodStore) -> None:
        """An update object of another key or number in this place makes the chunk a miss."""
        one, two = Object("a"), Object("b")
        one.put(store)
        for label in (1, 2):
            self.add_updates(store, two, labels=frozenset([label]))
        first, second = (peer._objects["lmcache", beside(two, number)] for number in (0, 1))
        data = [bytes(peer._memory[o.pages[0] * 16384 : o.pages[0] * 16384 + o.size]) for o in (first, second)]
        assert store.blobs.daemon.put(beside(one, 0), [data[0]])
        assert found_in(store, one.key) is None
        peer.evict(beside(two, 1))
        assert store.blobs.daemon.put(beside(two, 1), [data[0]])
        two.put(store)
        assert found_in(store, two.key) is None

    @pytest.mark.parametrize("name", ["500", "nothing", "silence", "half a body", "no HTTP"])
    def test_updating_a_broken_peer(self, peer: Peer, quick: HyperpodStore, name: str) -> None:
        """A put that fails under an update is an OSError in time, and not an update that is nowhere."""
        one = Object()
        peer.instead["put"] = ANSWERS[name]
        begun = time.monotonic()
        with pytest.raises(OSError):
            self.add_updates(quick, one, labels=frozenset([1]))
        assert time.monotonic() - begun < TIMEOUT_S + SLACK_S

    @pytest.mark.parametrize(("code", "is_hotspan"), [(503, False), (500, False), (429, False), (504, True)])
    def test_metadata_that_is_refused_is_not_absent(
        self, peer: Peer, store: HyperpodStore, code: int, is_hotspan: bool
    ) -> None:
        """A daemon that has metadata and does not lease it now makes no hit without its tags, and no update is lost.

        hotspan's own daemon answers 504 while it reads metadata from its disk.
        """
        one = Object()
        peer.is_hotspan = is_hotspan
        one.put(store)
        self.add_updates(store, one, labels=frozenset([1]), expires_s=77)

        def answer(handler: Handler) -> None:
            if beside(one, 0) in handler.path:
                handler.answer(code)
            else:
                handler._lease(("lmcache", one.key.hex()))

        peer.instead["lease"] = answer
        with pytest.raises(OSError, match=f"answered {code} to a lease"):
            found_in(store, one.key)
        with pytest.raises(OSError, match=f"answered {code} to a lease"):
            self.add_updates(store, one, labels=frozenset([2]))
        peer.instead.clear()
        assert there(store, one.key).terms.labels == {1} and there(store, one.key).terms.expires_s == 77

    def test_leases_are_released_where_nobody_says_whose_daemon_it_is(
        self, peer: Peer, store: HyperpodStore, make: Callable[..., HyperpodStore]
    ) -> None:
        """A look-up that fails, since the daemon does not say whether it is hotspan's, leaves no lease behind."""
        one, two = Object("a"), Object("b")
        for each in (one, two):
            each.put(store)
            self.add_updates(store, each, labels=frozenset([1]))

        def answer(handler: Handler) -> None:
            name = handler._parts()[3]
            handler.answer(504) if name == beside(one, 0) else handler._lease(("lmcache", name))

        peer.instead |= {"lease": answer, "health": ANSWERS["nothing"]}
        with pytest.raises(OSError):
            make(lease_ttl_s=3600.0).find([one.key, two.key])
        assert eventually(lambda: not peer.leases())

    def test_a_number_that_is_taken_and_not_there(self, peer: Peer, quick: HyperpodStore) -> None:
        """A peer that says 409 to every number and leases none is an OSError when the deadline is over."""
        peer.instead["put"] = status(409)
        begun = time.monotonic()
        with pytest.raises(OSError):
            self.add_updates(quick, Object(), labels=frozenset([1]))
        assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
