"""KV events with a key: whoever lacks it receives nothing, and is believed nothing."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from hotspan.config.kv_events import DOMAIN, CurveKeys, is_local, read_key
from hotspan.core.errors import ConfigError
from hotspan.router.types import Medium
from kit.ports import free_port
from kit.waiting import until_async

from .engine import Claims, keys_of
from .test_events import STEM, feed_for, running, told_by_vllm

pytest.importorskip("vllm.distributed.kv_events")
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    EventPublisherFactory,
    KVEventBatch,
    ZmqEventPublisher,
)

from hotspan.engine.events import KeyedPublisher, offer_publisher

OURS, OTHERS = CurveKeys.of(b"a" * 64), CurveKeys.of(b"b" * 64)


@contextlib.contextmanager
def publishing(keys: CurveKeys | None, ports: tuple[int, int], host: str = "127.0.0.1") -> Iterator[KeyedPublisher]:
    """An engine's publisher that has told of one text."""
    events, replay = (f"tcp://{host}:{port}" for port in ports)
    made = KeyedPublisher(keys, 0, events, replay_endpoint=replay, buffer_steps=100, topic="kv")
    try:
        made.publish(KVEventBatch(ts=1.0, events=[told_by_vllm()]))
        yield made
    finally:
        made.shutdown()


@pytest.fixture
def ports() -> tuple[int, int]:
    return free_port(), free_port()


async def test_with_the_key_events_are_followed(ports: tuple[int, int]) -> None:
    """Live messages and replays go to a router with the replica's key, on loopback as it was asked."""
    claims = Claims()
    with publishing(OURS, ports) as publisher:
        following = feed_for(claims, ports, keys=OURS)
        async with running(following):
            await until_async(lambda: claims.keys[Medium.GPU] == set(keys_of(STEM)))  # by the replay
            publisher.publish(KVEventBatch(ts=2.0, events=[AllBlocksCleared()]))
            await until_async(lambda: not claims.keys[Medium.GPU] and following.sync.is_exact)


@pytest.mark.parametrize(
    ("publisher", "follower"), [(OURS, None), (OURS, OTHERS), (None, OURS), (OTHERS, OURS)], ids=str
)
async def test_without_the_key_nothing_is_heard_or_believed(
    ports: tuple[int, int], publisher: CurveKeys | None, follower: CurveKeys | None
) -> None:
    """A router without the replica's key, and one before a publisher without its own, count refused connections."""
    claims = Claims()
    with publishing(publisher, ports):
        following = feed_for(claims, ports, keys=follower)
        async with running(following):
            await until_async(lambda: following.failures >= 2)
        assert (following.sync.messages, following.sync.is_exact) == (0, False) and not any(claims.keys.values())


REFUSED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
REFUSED |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@contextlib.contextmanager
def eavesdropper(port: int, kind: int, **options: Any) -> Iterator["zmq.Socket[bytes]"]:
    """A client of its own making at a publisher's port; its monitor tells when it was refused."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        for name, value in options.items():
            socket.setsockopt(getattr(zmq, name), value)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        # Before it connects: a refusal for good comes once.
        with contextlib.closing(socket.get_monitor_socket(REFUSED)):
            socket.connect(f"tcp://127.0.0.1:{port}")
            try:
                yield socket
            finally:
                socket.disable_monitor()


async def test_the_publishers_public_key_is_not_enough(ports: tuple[int, int]) -> None:
    """Who knows it but has another key pair is refused: the publisher asks who follows."""
    public, secret = zmq.curve_keypair()
    stranger = {"CURVE_SERVERKEY": OURS.publisher, "CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret}
    stranger["ZAP_DOMAIN"] = DOMAIN
    with publishing(OURS, ports) as publisher, contextlib.ExitStack() as stack:
        heard = [stack.enter_context(eavesdropper(ports[0], zmq.SUB, **stranger)) for _ in range(3)]
        asked = stack.enter_context(eavesdropper(ports[1], zmq.DEALER, **stranger))
        ends = [socket.get_monitor_socket() for socket in (*heard, asked)]
        asked.send_multipart([b"", (0).to_bytes(8, "big")])
        await until_async(lambda: all(end.poll(0) for end in ends))
        claims = Claims()
        following = feed_for(claims, ports, keys=OURS)
        async with running(following):  # what the others would have heard by now
            await until_async(lambda: following.sync.messages == 1)
            publisher.publish(KVEventBatch(ts=2.0, events=[AllBlocksCleared()]))
            await until_async(lambda: following.sync.messages == 2)
        assert not any(socket.poll(0) for socket in (*heard, asked))


def test_engines_take_this_publisher(tmp_path: Path) -> None:
    """The connector offers it to the engine's factory under the name that vLLM's option has."""
    from vllm.config import KVEventsConfig

    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    before = dict(EventPublisherFactory._registry)
    try:
        offer_publisher(key)
        config = KVEventsConfig(enable_kv_cache_events=True, endpoint=f"tcp://127.0.0.1:{free_port()}")
        made = EventPublisherFactory.create(config)
        assert isinstance(made, KeyedPublisher)
        assert made._pub.getsockopt(zmq.MECHANISM) == zmq.CURVE
        made.shutdown()
        offer_publisher(None)
        plain = EventPublisherFactory.create(config)
        assert isinstance(plain, ZmqEventPublisher) and plain._pub.getsockopt(zmq.MECHANISM) == zmq.NULL
        plain.shutdown()
    finally:
        EventPublisherFactory._registry.clear()
        EventPublisherFactory._registry.update(before)


@pytest.mark.parametrize(
    ("text", "mode", "said"),
    [("short", 0o600, "too short"), ("k" * 32, 0o644, "open to other"), ("k " * 32, 0o600, "spaces")],
)
def test_a_key_that_is_none_is_refused(tmp_path: Path, text: str, mode: int, said: str) -> None:
    """A key that can be guessed, or that others can read."""
    file = tmp_path / "key"
    file.write_text(text)
    os.chmod(file, mode)
    with pytest.raises(ConfigError, match=said):
        read_key(file)


def test_no_key_in_repr() -> None:
    """A log line of the keys tells only what is public."""
    assert OURS.publisher_secret.decode() not in repr(OURS) and OURS.follower_secret.decode() not in repr(OURS)


@pytest.mark.parametrize(
    ("endpoint", "is_so"),
    [
        ("tcp://127.0.0.1:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://localhost:1", True),
        ("ipc:///tmp/x", True),
        ("inproc://x", True),
        ("tcp://*:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("tcp://[::]:5557", False),
        ("tcp://10.0.0.5:5557", False),
        ("tcp://host:5557", False),
        ("tcp://127.0.0.1.example.com:1", False),
        ("epgm://eth0;239.192.1.1:5555", False),
        ("nonsense", False),
    ],
)
def test_what_is_local(endpoint: str, is_so: bool) -> None:
    """Loopback addresses and sockets of this machine are; every other address is open."""
    assert is_local(endpoint) is is_so
