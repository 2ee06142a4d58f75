"""HyperPod's daemon as an L2: what was put comes back."""

import contextlib
import ssl
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotspan import __version__
from hotspan.core.terms import Terms
from hotspan.l2.base import Found, StoreUsage, updates_of
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.options import HyperpodOptions
from hotspan.testing.chunks import chain, key_of
from hotspan.testing.clock import SimulatedClock
from tests.certificates import make_certificate
from tests.daemon_protocol.client import eventually
from tests.daemon_protocol.peer import Peer
from tests.l2.hyperpod.broken_answers import ANSWERS, status
from tests.l2.hyperpod.rig import (
    PATIENT,
    SIZE,
    SLACK_S,
    TIMEOUT_S,
    JumpingClock,
    Object,
    found_in,
    there,
)


class TestObjects:
    def test_the_daemon_holds_one_run_of_bytes(self, peer: Peer, store: HyperpodStore) -> None:
        """The value is the record, zeros up to 4096 and the frame, under the key in hexadecimal."""
        one = Object()
        assert one.put(store)
        stored = peer._objects["lmcache", one.key.hex()]
        parts = [peer._memory[part["offset"] : part["offset"] + part["len"]] for part in stored.offsets()]
        assert b"".join(parts) == one.value

    def test_get_needs_no_find(self, store: HyperpodStore) -> None:
        """A Found that this store did not give, or gave twice, is read; one of another record is a miss."""
        one = Object()
        one.put(store)
        found = Found(one.record, one.record.terms)
        assert one.get(store, found) and one.get(store, found)
        assert not one.get(store, replace(found, record=one.record._replace(stamp=8)))
        assert not one.get(store, Found(Object("b").record, Terms()))

    def test_putting_does_not_join(self, store: HyperpodStore, make: Callable[..., HyperpodStore]) -> None:
        """A put of 8 MiB takes far less memory of its own."""
        one = Object(size=8 << 20)
        one.put(make(port=None, bucket="warm"))
        tracemalloc.start()
        try:
            assert store.put(one.record, one.frame)
            # The peer is in this process, and holds a page at a time.
            assert tracemalloc.get_traced_memory()[1] < 2 << 20
        finally:
            tracemalloc.stop()

    def test_what_is_too_large_is_neither_put_nor_read(
        self, store: HyperpodStore, make: Callable[..., HyperpodStore]
    ) -> None:
        """Above `max_lease_size_mb` a put is an OSError, and what is there is a miss whose lease is released."""
        small = make(max_lease_size_mb=1)
        one = Object(size=1 << 20)
        with pytest.raises(OSError, match="max_lease_size_mb"):
            one.put(small)
        assert one.put(store)
        assert found_in(small, one.key) is None and small.refused["size"] == 1
        assert one.get(store, there(store, one.key))

    def test_it_says_who_asks(self, peer: Peer, store: HyperpodStore) -> None:
        """Every request has hotspan's User-Agent."""
        one = Object()
        one.put(store)
        one.get(store, there(store, one.key))
        assert peer.agents == {f"hotspan/{__version__}"}

    def test_buckets_are_encoded(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """A bucket of any name is one segment of the path."""
        odd = make(bucket="a b/c@%41")
        one = Object()
        assert one.put(odd) and one.get(odd, there(odd, one.key))
        assert ("a b/c@%41", one.key.hex()) in peer._objects


class TestFind:
    def test_a_chain_up_to_its_end(self, peer: Peer, store: HyperpodStore) -> None:
        """Of a long chain with a gap, what stands before the gap is found in order, and None for the rest."""
        objects = [Object(key=chunk.key, size=100) for chunk in chain("long", 60)]
        for one in objects[:40] + objects[41:]:
            assert one.put(store)
        found = store.find([one.key for one in objects])
        assert [one.record.key for one in found[:40] if one is not None] == [one.key for one in objects[:40]]
        assert found[40] is None and eventually(lambda: peer.leases() == 0)

    def test_a_chain_that_ends_soon_costs_little(self, peer: Peer, store: HyperpodStore) -> None:
        """Of 400 keys whose first ten are there some dozens are asked for: batches grow, and do not jump."""
        chunks = chain("short", 400)
        for chunk in chunks[:10]:
            assert Object(key=chunk.key, size=10).put(store)
        before = peer.asked["lease"]
        assert [one is not None for one in store.find([chunk.key for chunk in chunks])] == [True] * 10 + [False] * 390
        assert peer.asked["lease"] - before <= 8 + 8 + 16 + 2

    def test_a_chain_that_is_not_there_costs_little(self, peer: Peer, store: HyperpodStore) -> None:
        """Of 400 keys whose first is missing only a few are asked for, and nobody waits for them."""
        assert store.find([chunk.key for chunk in chain("none", 400)]) == [None] * 400
        assert peer.asked["lease"] <= 8 and set(peer.holds_ms) == {0}

    def test_connections_are_few_and_kept(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """A store of four connections opens no more, whatever it is asked and by however many threads."""
        store = make(max_connections_per_host=4)
        objects = [Object(key=chunk.key, size=100) for chunk in chain("x", 30)]
        for one in objects:
            one.put(store)
        results: list[bool] = []

        def read() -> None:
            for found, one in zip(store.find([one.key for one in objects]), objects, strict=True):
                results.append(found is not None and one.get(store, found))

        threads = [threading.Thread(target=read) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 180
        assert eventually(lambda: peer.leases() == 0)
        assert peer.connections <= 4

    def test_a_connection_that_was_closed_is_opened_anew(self, peer: Peer, store: HyperpodStore) -> None:
        """A peer that closes idle connections is no fault, for any call."""
        one = Object()
        calls: list[Callable[[], object]] = [
            lambda: one.put(store),
            lambda: found_in(store, one.key),
            lambda: one.get(store, Found(one.record, Terms())),
            lambda: Object("b").put(store),
        ]
        for call in calls:
            peer.cut()
            assert call()


class TestExpiry:
    @pytest.mark.parametrize(("reading", "is_hit"), [(1, True), (2, False), (3, False), (4, True)])
    def test_a_lease_that_runs_out_meanwhile(
        self, make: Callable[..., HyperpodStore], reading: int, is_hit: bool
    ) -> None:
        """Where in `get` the time of its lease runs out, before the copy or during it, it is a miss.

        The clock jumps at the n-th time that it is read: 1 is before the lease is asked for, 4 after the last check.
        """
        clock = JumpingClock()
        store = make(clock)
        one = Object()
        one.put(store)
        found = there(store, one.key)
        clock.jump_at = reading
        assert one.get(store, found) is is_hit

    def test_time_is_counted_from_before_the_request(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """The time that a lease's answer takes is taken off its time to live."""
        clock = SimulatedClock()
        store = make(clock, lease_ttl_s=5.0)
        one = Object()
        one.put(store)

        def slowly(said: dict[str, Any]) -> dict[str, Any]:
            clock.advance(5.0)
            return said

        peer.twist = slowly
        assert found_in(store, one.key) is None


class TestHttps:
    @pytest.fixture
    def certified(self, tmp_path: Path) -> Iterator[Peer]:
        """A peer with a certificate of its own making for 127.0.0.1."""
        context, made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), make_certificate(tmp_path)
        context.load_cert_chain(made.certificate, made.key)
        with Peer(16 << 20, tls=context) as peer:
            yield peer

    def test_what_was_put_comes_back(self, certified: Peer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Over TLS objects are put, found and read, on connections that are kept."""
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "certificate.pem"))
        only_one = {"use_https": True, "max_connections": 1}  # a lease's release in the background may want another
        settings = HyperpodOptions(shared_memory_name=certified.name, **only_one, **PATIENT)
        with contextlib.closing(HyperpodStore("127.0.0.1", certified.port, settings)) as store:
            for one in (Object(str(size), size) for size in (10, SIZE, 3 << 20)):
                assert one.put(store) and one.get(store, there(store, one.key)) and not one.put(store)
        assert certified.connections <= 4

    def test_a_stranger_is_not_spoken_to(self, certified: Peer) -> None:
        """A certificate that nobody vouches for is an OSError, and nothing was asked."""
        settings = HyperpodOptions(shared_memory_name=certified.name, use_https=True, **PATIENT)
        store = HyperpodStore("127.0.0.1", certified.port, settings)
        with contextlib.closing(store), pytest.raises(OSError, match="certificate"):
            Object().put(store)
        assert not certified.asked


class TestUsage:
    def test_the_protocol_does_not_say(self, peer: Peer, store: HyperpodStore) -> None:
        """Another's daemon, and a field that is no number, count as nothing said."""
        assert store.usage() == StoreUsage()
        peer.instead["health"] = lambda handler: handler.answer(
            200, b'{"service": "hotspan-daemon", "objects": 3, "bytes": 4.5, "capacity_bytes": 6}'
        )
        assert store.usage() == StoreUsage(3, 0, 6)


class TestDelete:
    def test_the_protocol_has_none(self, peer: Peer, store: HyperpodStore, caplog: pytest.LogCaptureFixture) -> None:
        """On another's daemon nothing is deleted and no DELETE is sent; one line says so, once."""
        one = Object()
        one.put(store)
        for _ in range(3):
            store.delete([one.key])
        assert peer.asked["delete"] == 0 and there(store, one.key)
        assert [record.message.split()[0] for record in caplog.records] == ["l2_can_not_delete"]

    @pytest.mark.parametrize("answer", [b"null", b"[]", b'{"service": "other"}', b"<html>", b"", b'"hotspan-daemon"'])
    def test_who_does_not_say_so_is_not_hotspans(self, peer: Peer, store: HyperpodStore, answer: bytes) -> None:
        """A health answer of another kind is another's daemon."""
        peer.is_hotspan = True
        peer.instead["health"] = lambda handler: handler.answer(200, answer)
        store.delete([key_of("a")])
        assert peer.asked["delete"] == 0

    def test_hotspans_own_deletes(self, peer: Peer, store: HyperpodStore) -> None:
        """On hotspan's daemon objects and their updates go; those that are not there are no error."""
        peer.is_hotspan = True
        objects = [Object(key=chunk.key, size=10) for chunk in chain("d", 5)]
        for one in objects[:4]:
            one.put(store)
        for label in range(3):
            store.add_updates({objects[0].key: updates_of(Terms(labels=frozenset([label + 1])), 1)})
        there(store, objects[0].key)
        store.delete([one.key for one in objects if one is not objects[1]])
        assert [name for name in peer.names() if ".m" not in name] == [objects[1].key.hex()]
        assert found_in(store, objects[0].key) is None
        assert objects[0].put(store) and there(store, objects[0].key).terms.labels == frozenset()
        assert eventually(lambda: peer.leases() == 0)

    def test_another_daemon_is_asked_anew(self, peer: Peer, store: HyperpodStore) -> None:
        """Whose daemon it is is asked once for each segment, and again when another one has taken its place."""
        for _ in range(3):
            store.delete([key_of("a")])
        assert peer.asked["health"] == 1 and peer.asked["delete"] == 0
        peer.is_hotspan = True
        peer.restart()
        one = Object()
        one.put(store)
        store.delete([one.key])
        assert peer.asked["health"] == 2 and not peer.names()

    def test_what_was_deleted_meanwhile_is_not_read(self, peer: Peer, store: HyperpodStore) -> None:
        """What another replica deleted after it was found is not read, and no lease of it is left."""
        one, two = Object("a"), Object("b")
        one.put(store), two.put(store)
        before = [there(store, each.key) for each in (one, two)]
        peer.delete(("lmcache", one.key.hex()))
        assert [each.get(store, found) for each, found in zip((one, two), before, strict=True)] == [False, True]
        assert eventually(lambda: peer.leases() == 0)

    @pytest.mark.parametrize("name", ["500", "nothing", "silence", "405"])
    def test_a_delete_that_fails(self, peer: Peer, store: HyperpodStore, quick: HyperpodStore, name: str) -> None:
        """It is an OSError in time; after a refusal the next one asks again whose daemon it is."""
        peer.is_hotspan = True
        peer.instead["delete"] = status(405) if name == "405" else ANSWERS[name]
        failing = quick if name == "silence" else store
        begun = time.monotonic()
        with pytest.raises(OSError):
            failing.delete([key_of("a")])
        assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
        with pytest.raises(OSError):
            failing.delete([key_of("a")])
        if failing is store:
            assert peer.asked["health"] == (1 if name == "nothing" else 2)

    @pytest.mark.parametrize("name", ["silence", "trickle", "nothing"])
    def test_who_can_not_be_asked(self, peer: Peer, quick: HyperpodStore, name: str) -> None:
        """A daemon that does not say whose it is is an OSError in time, and no deletion that did not happen."""
        peer.instead["health"] = ANSWERS[name]
        begun = time.monotonic()
        with pytest.raises(OSError):
            quick.delete([key_of("a")])
        assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
