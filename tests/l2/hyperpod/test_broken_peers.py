"""Whatever a peer answers, or does not, is a miss or an OSError in time."""

import contextlib
import errno
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hotspan.core.terms import Terms
from hotspan.l2.base import Found, updates_of
from hotspan.l2.http_client import Connection
from hotspan.l2.hyperpod import HyperpodStore
from hotspan.l2.options import HyperpodOptions
from hotspan.testing.chunks import chain, key_of
from kit.waiting import at_last
from tests.daemon_protocol.client import eventually
from tests.daemon_protocol.peer import Handler, Peer
from tests.l2.hyperpod.broken_answers import ANSWERS, TWISTS, sends, status, until_gone
from tests.l2.hyperpod.rig import PATIENT, SLACK_S, TIMEOUT_S, Object, found_in, missed, there


class TestLies:
    @pytest.mark.parametrize("twist", TWISTS.values(), ids=TWISTS.keys())
    def test_a_lease_that_is_none(self, peer: Peer, store: HyperpodStore, twist: Callable[..., Any]) -> None:
        """Whatever a lease says instead of what it should, it is a miss or an OSError, and the next one is read."""
        one = Object()
        one.put(store)
        peer.twist = twist
        missed(lambda: (found := found_in(store, one.key)) is not None and one.get(store, found))
        missed(lambda: one.get(store, Found(one.record, Terms())))
        peer.twist = None
        assert one.get(store, there(store, one.key))

    def test_odd_lease_ids_are_released(self, peer: Peer, store: HyperpodStore) -> None:
        """An id of any characters, half a pair of surrogates among them, is used and released."""
        one = Object()
        one.put(store)
        for odd in ("a/b?c#d %", "\r\nX: y", "\ud800", "ü", "..", ""):
            peer.twist = lambda said, odd=odd: {**said, "id": odd}
            before = peer.asked["release"]
            assert one.get(store, there(store, one.key))
            assert eventually(lambda before=before: peer.asked["release"] > before)  # type: ignore[misc]

    def test_one_lie_among_many_releases_the_others(self, peer: Peer, store: HyperpodStore) -> None:
        """Where one answer of many is no lease the look-up is an OSError, and all that was granted is released."""
        objects = [Object(key=chunk.key, size=10) for chunk in chain("many", 8)]
        for one in objects:
            one.put(store)
        granted = itertools.count()
        peer.twist = lambda said: b"?" if next(granted) == 4 else said
        with pytest.raises(OSError, match="no lease"):
            store.find([one.key for one in objects])
        peer.twist = None
        assert eventually(lambda: peer.leases() == 1), "the one that could not be read runs out by itself"

    def test_a_refused_lease_is_released(self, peer: Peer, store: HyperpodStore) -> None:
        """What is not believed is let go of, and counted by reason."""
        one = Object()
        one.put(store)
        peer.twist = TWISTS["offset negative"]
        assert found_in(store, one.key) is None and store.refused == {"offsets": 1}
        assert eventually(lambda: peer.leases() == 0)


class TestBrokenPeers:
    @pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
    def test_a_lease_that_is_not_answered(
        self, peer: Peer, store: HyperpodStore, quick: HyperpodStore, answer: Callable[..., None]
    ) -> None:
        """Whatever comes instead of a lease, `find` and `get` are a miss or an OSError in time; then all is well."""
        one = Object()
        one.put(store)
        peer.instead["lease"] = answer
        missed(lambda: found_in(quick, one.key))
        missed(lambda: one.get(quick, Found(one.record, Terms())))
        del peer.instead["lease"]
        assert at_last(lambda: one.get(quick, there(quick, one.key)))

    @pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
    def test_a_put_that_is_not_answered(self, peer: Peer, quick: HyperpodStore, answer: Callable[..., None]) -> None:
        """Whatever comes instead of 200 and 409, a put is an OSError in time, and can be done again."""
        one = Object(size=1 << 20)
        peer.instead["put"] = answer
        begun = time.monotonic()
        with pytest.raises(OSError):
            one.put(quick)
        assert time.monotonic() - begun < TIMEOUT_S + SLACK_S
        del peer.instead["put"]
        assert at_last(lambda: one.put(quick) or found_in(quick, one.key))
        assert at_last(lambda: one.get(quick, there(quick, one.key)))

    def test_a_mistake_in_a_release_ends_no_release(
        self, peer: Peer, store: HyperpodStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An error that nobody expected costs its leases their time, and the next ones are released as ever."""
        failed, ask_all = threading.Event(), store.blobs.daemon._pool.ask_all

        def once(requests: Any, deadline: Any) -> Any:
            if failed.is_set() or not any(request.target.endswith("/release") for request in requests):
                return ask_all(requests, deadline)
            failed.set()
            raise ZeroDivisionError

        monkeypatch.setattr(store.blobs.daemon._pool, "ask_all", once)
        one = Object()
        one.put(store)
        assert one.get(store, there(store, one.key)) and eventually(failed.is_set)
        before = peer.asked["release"]
        assert one.get(store, there(store, one.key))
        assert eventually(lambda: peer.asked["release"] > before)

    @pytest.mark.parametrize("answer", [ANSWERS[name] for name in ("500", "nothing", "silence", "trickle", "404")])
    def test_a_release_that_is_not_answered(
        self, peer: Peer, store: HyperpodStore, answer: Callable[..., None]
    ) -> None:
        """A release that fails disturbs nobody, and `close` does not wait for it long."""
        peer.instead["release"] = answer
        one = Object()
        one.put(store)
        begun = time.monotonic()
        for _ in range(3):
            assert one.get(store, there(store, one.key))
        assert time.monotonic() - begun < SLACK_S
        begun = time.monotonic()
        store.close()
        assert time.monotonic() - begun < 1 + SLACK_S

    def test_a_refusal_before_the_body_is_read(self, peer: Peer, store: HyperpodStore) -> None:
        """A 409 or 507 that comes while the value is being sent is heard, if the peer hangs up and if it only stops."""
        one = Object(size=6 << 20)

        def answered(code: int, *, closes: bool) -> Callable[[Handler], None]:
            def answer(handler: Handler) -> None:
                handler.close_connection = True
                handler.answer(code)
                if closes:
                    handler.connection.shutdown(socket.SHUT_WR)
                until_gone(handler)

            return answer

        for closes in (True, False):
            peer.instead["put"] = answered(409, closes=closes)
            assert not one.put(store)
            peer.instead["put"] = answered(507, closes=closes)
            with pytest.raises(OSError, match="507"):
                one.put(store)
        peer.instead.clear()
        assert one.put(store)

    @pytest.mark.parametrize(
        ("code", "number"), [(507, errno.ENOSPC), (413, errno.EFBIG), (500, errno.EBUSY), (429, errno.EBUSY)]
    )
    def test_a_refusal_is_told_from_a_fault(self, peer: Peer, store: HyperpodStore, code: int, number: int) -> None:
        """A daemon that answers is well, whatever it answers: a full one is read on."""
        kept, other = Object("kept"), Object("other")
        assert kept.put(store)
        peer.instead["put"] = status(code)
        with pytest.raises(OSError) as refused:
            other.put(store)
        assert refused.value.errno == number
        assert kept.get(store, there(store, kept.key))

    def test_a_refusal_and_a_hang_up_between_two_looks(
        self, peer: Peer, store: HyperpodStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A 409 whose connection breaks before anybody looked for an answer is heard all the same."""
        monkeypatch.setattr(Connection, "_has_answered", lambda connection: False)

        def answer(handler: Handler) -> None:
            handler.close_connection = True
            handler.answer(409)  # and closes with most of the body unread: the client's writes fail

        peer.instead["put"] = answer
        assert not Object(size=6 << 20).put(store)

    def test_a_connection_that_ends_right_after_it_was_looked_at(
        self, peer: Peer, store: HyperpodStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A kept connection that the peer closes as it is used again is no fault: the request goes out once more."""
        one = Object()
        assert one.put(store)
        monkeypatch.setattr(Connection, "is_sound", lambda connection: True)
        peer.cut()
        found = there(store, one.key)
        peer.cut()
        assert not one.put(store)
        assert one.get(store, found)

    def test_what_nobody_asked_is_not_an_answer(self, peer: Peer, store: HyperpodStore) -> None:
        """What a peer says on an idle connection (408, before it closes it) is not taken for the next answer."""
        is_idle, has_spoken = threading.Event(), threading.Event()

        def answer(handler: Handler) -> None:
            handler.answer(404)
            assert is_idle.wait(60)
            handler.wfile.write(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            has_spoken.set()

        peer.instead["lease"] = answer
        assert found_in(store, key_of("a")) is None
        is_idle.set()
        assert has_spoken.wait(60)
        peer.instead.clear()
        assert Object().put(store)

    def test_a_peer_that_wants_no_more(self, peer: Peer, store: HyperpodStore) -> None:
        """After `Connection: close` the next request goes out on another connection, though the peer lets it stand."""

        def last(handler: Handler) -> None:
            handler.send_response(404)
            handler.send_header("Content-Length", "0")
            handler.send_header("Connection", "close")
            handler.end_headers()
            until_gone(handler)

        peer.instead["lease"] = last
        for _ in range(3):
            assert found_in(store, key_of("a")) is None
        assert peer.connections == 3

    def test_nobody_listens(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """A refused connection is an OSError from every method, at once."""
        taken = socket.socket()
        taken.bind(("127.0.0.1", 0))  # and does not listen
        store = make(port=taken.getsockname()[1])
        one = Object()
        calls: list[Callable[[], object]] = [
            lambda: one.put(store),
            lambda: store.find([one.key]),
            lambda: one.get(store, Found(one.record, Terms())),
            lambda: store.add_updates({one.key: updates_of(Terms(is_wild=True), 1)}),
            lambda: store.delete([one.key]),
        ]
        for call in calls:
            with pytest.raises(OSError):
                call()
        taken.close()

    def test_nobody_accepts(self, make: Callable[..., HyperpodStore]) -> None:
        """A listener that takes no connection, and one that reads nothing, cost the deadline and no more."""
        with socket.create_server(("127.0.0.1", 0), backlog=1) as mute:
            store = make(port=mute.getsockname()[1], timeout_ms=int(TIMEOUT_S * 1000))
            missed(lambda: Object(size=8 << 20).put(store))
            missed(lambda: store.find([key_of(f"{number}") for number in range(50)]) != [None] * 50)

    def test_a_name_that_is_none(self, peer: Peer) -> None:
        """A host that can't be resolved, of any form, is an OSError."""
        for host in ("no such host.invalid", "a" * 300, "ü\udc80", ""):
            store = HyperpodStore(host, peer.port, HyperpodOptions(timeout_ms=2000))
            with pytest.raises(OSError):
                store.find([key_of("a")])
            store.close()

    def test_a_name_is_resolved(self, peer: Peer) -> None:
        """A host may be given by name."""
        store = HyperpodStore("localhost", peer.port, HyperpodOptions(shared_memory_name=peer.name, **PATIENT))
        one = Object()
        assert one.put(store) and one.get(store, there(store, one.key))
        store.close()

    def test_faults_leak_nothing(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """After faults of every kind and `close`, no descriptor and no thread of the store is left."""
        before, others = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
        store = make(timeout_ms=100)
        one = Object()
        at_last(lambda: one.put(store) or found_in(store, one.key))
        for name in ("500", "nothing", "silence", "half a body", "no HTTP", "trickle"):
            for operation in ("lease", "put", "release"):
                peer.instead = {operation: ANSWERS[name]}
                with contextlib.suppress(OSError):
                    store.find([one.key, key_of("b")])
                with contextlib.suppress(OSError):
                    one.put(store)
        peer.instead = {}
        at_last(lambda: there(store, one.key))
        store.close()
        assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= before)
        assert eventually(
            lambda: not [one for one in set(threading.enumerate()) - others if one.name.startswith("hotspan-l2")]
        )
        with pytest.raises(OSError, match="closed"):
            store.find([one.key])
        store.close()

    def test_closing_wakes_who_waits(self, peer: Peer, make: Callable[..., HyperpodStore]) -> None:
        """A call that another thread is in ends with an OSError when the store is closed."""
        store = make()
        waiting = threading.Event()

        def silent(handler: Handler) -> None:
            waiting.set()
            until_gone(handler)

        peer.instead["lease"] = silent
        raised: list[BaseException] = []

        def find() -> None:
            try:
                store.find([key_of("a")])
            except OSError as error:
                raised.append(error)

        thread = threading.Thread(target=find)
        thread.start()
        assert waiting.wait(60)
        store.close()
        thread.join(SLACK_S)
        assert not thread.is_alive() and len(raised) == 1

    @hypothesis_settings(
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
        max_examples=120,
        deadline=None,
    )
    @given(
        data=st.one_of(
            st.binary(max_size=300),
            st.builds(
                lambda head, body: b"HTTP/1.1 200 OK\r\n" + head + b"\r\n" + body,
                st.sampled_from(
                    [b"", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Content-Length: x\r\n"]
                ),
                st.binary(max_size=60) | st.from_regex(rb"\A[0-9a-f-]{1,9}\r\n[^z]{0,9}\r\n0?"),
            ),
        )
    )
    def test_any_bytes_are_no_hit(self, peer: Peer, quick: HyperpodStore, data: bytes) -> None:
        """Whatever a peer sends before it hangs up, `find` is a miss or an OSError."""
        peer.instead["lease"] = sends(data)
        missed(lambda: found_in(quick, key_of("a")))
