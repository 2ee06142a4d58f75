"""Events: what is claimed is true whenever the feed says that all is known; what is missed is noticed."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.config.kv_events import CurveKeys
from hotspan.core.errors import ConfigError
from hotspan.router import event_sync
from hotspan.router.blocks import Blocks
from hotspan.router.event_messages import Cleared, Event, UnknownMessage, events_of
from hotspan.router.event_sync import REASONS, EventSync
from hotspan.router.events import EventFeed
from hotspan.router.settings import Replica
from hotspan.router.text import Roots
from hotspan.router.types import Medium
from kit.ports import free_port
from kit.waiting import until_async
from tests.router.engine import Claims, Text, blocks_of, join, keys_of, message, removed, stored, whole_keys
from tests.router.rig import replicas, routed, say_ok
from tests.router.test_tokens import made

STEM: Text = tuple(7 * at % 200 + 1 for at in range(48))
TEXTS: list[Text] = [STEM, STEM + tuple(range(60, 120)), STEM[:36] + tuple(range(100, 160)), tuple(range(1, 60))]
OWN = (Medium.GPU, Medium.RAM, Medium.DISK)
"""An engine's; L2 is everybody's, outlives it, and is not forgotten with it."""


@dataclass
class Life:
    """One life of an engine: its messages, and what it held after each. Does random things.

    shared: blocks that were ever in the L2, by this engine or those before it.
    """

    rng: random.Random
    shared: set[int] = field(default_factory=set)
    held: dict[Medium, set[int]] = field(default_factory=lambda: {medium: set() for medium in Medium})
    messages: list[bytes] = field(default_factory=list)
    truths: list[dict[Medium, set[int]]] = field(default_factory=list)

    def step(self) -> None:
        """Do something, and say so in one message."""
        text, medium, chance = self.rng.choice(TEXTS), self.rng.choice(list(Medium)), self.rng.random()
        hashes = blocks_of(text)
        event: Event
        if chance < 0.04:
            event, held = Cleared(), {each: set[int]() for each in OWN} | {Medium.L2: self.held[Medium.L2]}
        elif chance < 0.6:
            last = self.rng.randint(1, len(hashes))
            held = {**self.held, medium: self.held[medium] | set(hashes[:last])}
            event = stored(text, 0, last, medium)
        else:
            gone = set(self.rng.sample(hashes, self.rng.randint(1, len(hashes))))
            held = {**self.held, medium: self.held[medium] - gone}
            event = removed(gone, medium)
        self.say(event, held)

    def say(self, event: Event, held: dict[Medium, set[int]]) -> None:
        """Say in one message what happened, and hold this since."""
        self.held = held
        self.shared |= held[Medium.L2]
        self.truths.append(held)
        self.messages.append(message(event, at_s=self.rng.random()))


class World:
    """An engine, a follower and what lies between them."""

    def __init__(
        self, seed: int, kind: type[EventSync] = EventSync, *, buffer: int = 10_000, has_replay: bool = True
    ) -> None:
        self.rng = random.Random(seed)
        self.claims = Claims()
        self.states: list[tuple[bool, str]] = []
        blocks = Blocks(join, Roots().of_engine)
        self.follower = kind(0, blocks, self.claims, lambda *state: self.states.append(state))
        self.buffer, self.has_replay, self.breaks = buffer, has_replay, 0.0
        self.life = Life(self.rng)
        self.caught_up = False

    def replay(self, start: int | None) -> None:
        """Replay for as long as it is asked, as a publisher does, or less well."""
        rounds = 0
        while start is not None:
            rounds += 1
            assert rounds < 200, "it never stops asking"
            is_whole = self.has_replay and self.rng.random() >= self.breaks
            known = list(enumerate(self.life.messages))[-self.buffer :] if self.has_replay else []
            for seq, payload in known:
                if seq >= start and (is_whole or self.rng.random() < 0.8):
                    self.follower.replayed(seq, payload)
            start = self.follower.replay_ended(is_whole=is_whole)
        while self.rng.random() < 0.9 and self.follower.fill():
            pass

    def connect(self) -> None:
        self.follower.disconnected()
        self.check(is_newest=False)
        self.replay(self.follower.connected())
        self.check(is_newest=self.has_replay)

    def restart(self) -> None:
        """The engine dies and comes back with nothing, which ends the connection."""
        self.life = Life(self.rng, self.life.shared)
        for _ in range(self.rng.choice((0, 0, 1, 3, 8))):
            self.life.step()
        self.connect()

    def deliver(self, seq: int, payload: bytes | None = None) -> None:
        sent = self.life.messages[seq] if payload is None else payload
        self.replay(self.follower.live(seq, sent))
        self.check(is_newest=seq == len(self.life.messages) - 1 and payload is None)

    def check(self, *, is_newest: bool) -> None:
        """Nothing untrue is claimed once the newest message was heard and all is said to be known."""
        assert self.follower.reason in ("", *REASONS) and (self.follower.reason == "") == self.follower.is_exact
        if self.states:
            assert self.states[-1] == (self.follower.is_exact, self.follower.reason)
        self.follower.blocks.check()
        self.caught_up = is_newest
        assert self.claims.keys[Medium.L2] <= whole_keys(TEXTS, self.life.shared), "it claims what never was in the L2"
        if is_newest and self.follower.is_exact:
            truth = self.life.truths[-1] if self.life.truths else {}
            for medium in OWN:
                allowed = whole_keys(TEXTS, truth.get(medium, set()))
                assert self.claims.keys[medium] <= allowed, "it claims what is not there"


def tell(world: World, rng: random.Random, faults: float) -> None:
    """Deliver what an engine says in many steps, with faults of every kind."""
    late: list[int] = []
    for _ in range(60):
        world.life.step()
        newest = len(world.life.messages) - 1
        fault = rng.random() / faults if faults else 1.0
        if fault < 0.15:
            continue  # lost
        if fault < 0.3:
            late.append(newest)
            continue
        if fault < 0.45 and newest:
            world.deliver(rng.randrange(newest))  # again, or for the first time
        elif fault < 0.55:
            world.restart()
            late.clear()
            continue
        elif fault < 0.65:
            world.connect()
        elif fault < 0.7:
            world.deliver(
                newest, rng.choice((b"", b"\xc1garbage", msgspec.msgpack.encode([1.0, [["BlockMoved", 1]], 0])))
            )
            continue
        world.deliver(newest)
        if late and rng.random() < 0.5:
            world.deliver(late.pop())
            world.deliver(newest)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 10**9),
    faults=st.sampled_from([0.0, 0.3, 1.0]),
    buffer=st.sampled_from([3, 20, 10_000]),
    has_replay=st.booleans(),
    breaks=st.sampled_from([0.0, 0.5]),
)
def test_what_is_claimed_is_true(seed: int, faults: float, buffer: int, has_replay: bool, breaks: float) -> None:
    """Whatever is lost, doubled, late, garbled or begun anew: claims are a subset of what the engine has."""
    world = World(seed, buffer=buffer, has_replay=has_replay)
    world.breaks = breaks
    world.replay(world.follower.connected())
    tell(world, random.Random(seed), faults)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_with_a_replay_all_is_known_in_the_end(seed: int) -> None:
    """With a whole replay buffer, faults but garbage leave it exact, and its claims are all there is."""
    world = World(seed)
    rng = random.Random(seed)
    world.replay(world.follower.connected())
    for _ in range(40):
        world.life.step()
        newest = len(world.life.messages) - 1
        match rng.randrange(5):
            case 0:
                continue
            case 1:
                world.restart()
            case _:
                world.deliver(newest)
    world.life.step()
    world.life.say(stored(STEM, 0, 12, Medium.L2), world.life.held | {Medium.L2: set(blocks_of(STEM))})
    world.deliver(len(world.life.messages) - 1)
    while world.follower.fill():
        pass
    assert world.follower.is_exact
    for medium in OWN:
        assert world.claims.keys[medium] == whole_keys(TEXTS, world.life.held[medium])
    assert world.claims.keys[Medium.L2] >= set(keys_of(STEM))


class Careless(EventSync):
    """Takes any number for the next."""

    def live(self, seq: int, payload: bytes) -> int | None:
        self._next = seq
        return super().live(seq, payload)


class Trusting(EventSync):
    """Takes whoever comes back for the same."""

    def _is_known(self, seq: int, payload: bytes) -> bool:
        return self._next is not None and seq < self._next


@pytest.mark.parametrize("kind", [Careless, Trusting])
def test_the_fuzz_finds_a_follower_that_checks_too_little(kind: type[EventSync]) -> None:
    """Without the check for gaps, or for another life, claims are found to be untrue."""
    with pytest.raises(AssertionError, match="claims what is not there"):
        for seed in range(60):
            world = World(seed, kind)
            world.replay(world.follower.connected())
            tell(world, random.Random(seed), 1.0)


def test_a_loss_is_told_with_its_reason_and_mended() -> None:
    """A gap without replay makes it approximate with nothing claimed; a cleared cache makes it exact again."""
    world = World(1, has_replay=False)
    world.replay(world.follower.connected())
    assert world.states[-1] == (False, "no_replay")
    whole = stored(STEM, 0, 12)
    world.replay(world.follower.live(0, message(whole)))
    assert world.follower.is_exact and world.claims.keys[Medium.GPU] == set(keys_of(STEM))
    world.replay(world.follower.live(2, message()))
    assert world.states[-1] == (False, "no_replay") and not world.claims.keys[Medium.GPU]
    assert (world.follower.gaps, world.follower.losses) == (1, 2)
    world.replay(world.follower.live(3, message(whole)))
    assert not world.follower.is_exact and world.claims.keys[Medium.GPU] == set(keys_of(STEM))
    world.replay(world.follower.live(4, message(Cleared())))
    assert world.follower.is_exact and not world.claims.keys[Medium.GPU]
    world.replay(world.follower.live(5, b"\xc1"))
    assert world.states[-1] == (False, "unreadable")


def test_a_replay_that_never_has_what_is_missing_is_not_asked_for_again_and_again() -> None:
    """Three replays in a row without a new message are a loss, which forgets all, and live messages go on."""
    world = World(1)
    follower, first = world.follower, message(stored(STEM, 0, 12))
    world.replay(follower.connected())
    follower.live(0, first)
    start, asked = follower.live(3, message(at_s=3.0)), 0
    while start is not None:
        asked += 1
        assert start == 0 and asked < 10
        follower.replayed(0, first)
        start = follower.replay_ended(is_whole=True)
    assert asked == 3 and (follower.gaps, follower.losses, follower.reason) == (1, 1, "gap")
    assert not world.claims.keys[Medium.GPU]
    assert follower.live(4, message(stored(STEM, 0, 12))) is None
    assert world.claims.keys[Medium.GPU] == set(keys_of(STEM))


def test_what_came_too_long_ago_is_not_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last messages a second copy is skipped; an older one may be another life's: all is replayed, then lost."""
    monkeypatch.setattr(event_sync, "_REMEMBERED", 4)
    world = World(1)
    world.replay(world.follower.connected())
    for _ in range(10):
        world.life.step()
        world.deliver(len(world.life.messages) - 1)
    assert world.follower.live(6, world.life.messages[6]) is None and world.follower.duplicates == 1
    start = world.follower.live(5, world.life.messages[5])
    assert start == 0 and world.follower.restarts == 1 and not world.follower.is_exact
    world.replay(start)
    assert (world.follower.losses, world.follower.reason) == (1, "gap"), "two replays from 0 did not end there"
    world.life.step()
    world.deliver(len(world.life.messages) - 1)  # checks that what is claimed is true


def test_after_a_loss_it_is_exact_once_nothing_unknown_came_for_long() -> None:
    """A thousand blocks in a row that are all known: what was there before can hardly be there still."""
    world = World(1, has_replay=False)
    world.replay(world.follower.live(7, message(removed(blocks_of(STEM)))))
    for seq in range(8, 8 + 84):
        assert not world.follower.is_exact
        world.replay(world.follower.live(seq, message(stored(STEM, 0, 12))))
    assert world.follower.is_exact and world.claims.keys[Medium.GPU] == set(keys_of(STEM))


@pytest.mark.parametrize("shape", ["map", "more fields", "array", "short array", "bytes"])
def test_messages_of_all_versions_are_read(shape: str) -> None:
    """Maps and arrays, with fields missing or more than are known, hashes as numbers or bytes."""
    hashes = [name.to_bytes(8, "big") for name in blocks_of(STEM)] if shape == "bytes" else blocks_of(STEM)
    new: dict[str, object] = {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": list(STEM),
    }
    new |= {"block_size": 4, "lora_id": None, "medium": "GPU", "lora_name": None}
    old = ["BlockStored", hashes, None, list(STEM), 4]
    batch = {
        "map": [1.0, [new]],
        "bytes": [1.0, [new], 0],
        "more fields": [1.0, [new | {"session_id": "s", "locality": None, "new": {"a": 1}}], 0, "more"],
        "array": [1.0, [[*old, None, "GPU", None, [None] * 12, 0, None, None, None, "more"]], 0],
        "short array": [1.0, [old, ["BlockRemoved", []], ["AllBlocksCleared"], old], None],
    }[shape]
    blocks = Blocks(join, Roots().of_engine)
    event = events_of(msgspec.msgpack.encode(batch))[-1]
    assert blocks.store(event) == (Medium.GPU, keys_of(STEM))  # type: ignore[arg-type]


@given(payload=st.binary(max_size=60))
def test_garbage_is_one_error(payload: bytes) -> None:
    """Any bytes are a message or an UnknownMessage."""
    with contextlib.suppress(UnknownMessage):
        events_of(payload)


# -- over ZMQ ---------------------------------------------------------------------------------------------------------


class Publisher:
    """Speaks the engine's protocol: a PUB and a ROUTER with a buffer. Hears of subscribers; can forget to publish."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], seed: int, ports: tuple[int, int] = (0, 0)) -> None:
        self.pub, self.router = context.socket(zmq.XPUB), context.socket(zmq.ROUTER)
        self.ports = tuple(
            self._bind(socket, port) for socket, port in zip((self.pub, self.router), ports, strict=True)
        )
        self.life = Life(random.Random(seed))
        self.asked: list[int] = []

    def _bind(self, socket: zmq.Socket[bytes], port: int) -> int:
        socket.setsockopt(zmq.LINGER, 0)
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.bind(f"tcp://127.0.0.1:{port}" if port else "tcp://127.0.0.1:*")
                break
            except zmq.ZMQError:  # whoever had the port is about to be gone
                if not port or time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        return int(socket.getsockopt(zmq.LAST_ENDPOINT).decode().rsplit(":", 1)[1])  # type: ignore[union-attr]

    def step(self, *, is_sent: bool = True) -> None:
        self.life.step()
        if is_sent:
            seq = len(self.life.messages) - 1
            self.pub.send_multipart([b"kv", seq.to_bytes(8, "big"), self.life.messages[-1]])

    def has_subscriber(self) -> bool:
        """Whether one has come since this was last asked."""
        return bool(self.pub.poll(0)) and self.pub.recv()[:1] == b"\1"

    def serve(self) -> None:
        """Answer replay requests that are there."""
        while self.router.poll(0):
            client, empty, start = self.router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            for seq, payload in enumerate(self.life.messages):
                if seq >= self.asked[-1]:
                    self.router.send_multipart([client, empty, b"kv", seq.to_bytes(8, "big"), payload])
            self.router.send_multipart([client, empty, b"", (-1).to_bytes(8, "big", signed=True), b""])

    def close(self) -> None:
        self.pub.close(0)
        self.router.close(0)


@contextlib.asynccontextmanager
async def running(feed: EventFeed) -> AsyncIterator[None]:
    """A feed that follows."""
    task = asyncio.create_task(feed.run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def feed_for(
    claims: Claims,
    ports: tuple[int, ...],
    states: list[tuple[bool, str]] | None = None,
    *,
    replay_wait_s: float = 60.0,
    keys: CurveKeys | None = None,
) -> EventFeed:
    """A feed of the publisher at these ports."""
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    told = [] if states is None else states
    sync = EventSync(0, Blocks(join, Roots().of_engine), claims, lambda *state: told.append(state))  # type: ignore[arg-type]
    return EventFeed(sync, events, replay, topic="kv", replay_wait_s=replay_wait_s, keys=keys)


def told_by_vllm() -> Any:
    """vLLM's own event for the blocks of STEM."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    return kv_events.BlockStored(
        block_hashes=[name.to_bytes(32, "big") for name in blocks_of(STEM)],
        parent_block_hash=None,
        token_ids=list(STEM),
        block_size=4,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        extra_keys=[None] * 12,
        group_idx=0,
        session_id="s",
    )


async def test_over_zmq_a_gap_is_replayed_and_a_restart_is_noticed() -> None:
    """Messages that were never sent are replayed; an engine that comes back is known for another one."""
    states: list[tuple[bool, str]] = []
    claims = Claims()
    with zmq.Context() as context:
        first = Publisher(context, 1)
        feed = feed_for(claims, first.ports, states)

        def agrees(publisher: Publisher) -> bool:
            held = publisher.life.held
            return feed.sync.is_exact and all(claims.keys[each] == whole_keys(TEXTS, held[each]) for each in OWN)

        try:
            for _ in range(5):
                first.step(is_sent=False)  # before anybody listened
            async with running(feed):
                await until_async(lambda: agrees(first), meanwhile=first.serve)
                for at in range(60):
                    first.step(is_sent=at % 7 != 3)
                    first.serve()
                    await asyncio.sleep(0.002)
                first.step()
                await until_async(lambda: agrees(first) and feed.sync.messages >= 66, meanwhile=first.serve)
                assert feed.sync.gaps > 0 and feed.sync.losses == 0
                assert feed.sync.messages == 66  # each was applied once
                first.close()
                await until_async(lambda: states[-1] == (False, "disconnected"))
                assert not any(claims.keys[each] for each in OWN)
                second = Publisher(context, 2, (first.ports[0], first.ports[1]))
                for _ in range(90):
                    second.step(is_sent=False)
                try:
                    await until_async(lambda: agrees(second), meanwhile=second.serve)
                    assert second.asked[-2:] == [65, 0]
                finally:
                    second.close()
        finally:
            first.close()


async def test_over_zmq_without_replay_it_is_approximate_and_says_so() -> None:
    """A replay endpoint that does not answer is a loss, and live messages go on."""
    with zmq.Context() as context:
        publisher = Publisher(context, 1)
        claims = Claims()
        feed = feed_for(claims, publisher.ports, replay_wait_s=1.0)
        try:
            publisher.step(is_sent=False)
            async with running(feed):
                await until_async(publisher.has_subscriber)
                await until_async(lambda: feed.sync.reason == "no_replay")
                publisher.pub.send_multipart([b"kv", b"short", b""])
                publisher.pub.send_multipart([b"kv", (9).to_bytes(8, "big"), message(stored(STEM, 0, 12))])
                await until_async(lambda: claims.keys[Medium.GPU] == set(keys_of(STEM)))
                assert (feed.sync.is_exact, feed.garbled, feed.sync.messages) == (False, 1, 1)
        finally:
            publisher.close()


async def test_the_gateway_follows_its_replicas(tmp_path: Path) -> None:
    """A replica with events is exact once they are replayed, and the metrics have its messages."""
    made("byte-level")[0].save(str(tmp_path / "tokenizer.json"))
    with zmq.Context() as context, contextlib.closing(Publisher(context, 1)) as publisher:
        publisher.step(is_sent=False)
        events, replay = (f"tcp://127.0.0.1:{port}" for port in publisher.ports)
        async with replicas(say_ok) as (fake,):
            behind = (Replica(fake.url, events=events, replay=replay),)
            async with routed([fake], behind=behind, model=tmp_path) as at:
                await until_async(lambda: at.router.fleet.replicas[fake.url].is_exact, meanwhile=publisher.serve)
                assert await at.metric("events_state", replica=fake.url, reason="") == 1
                assert await at.metric("events_state", replica=fake.url, reason="starting") == 0
                assert await at.metric("events_messages_total", replica=fake.url) == 1
                assert await at.metric("events_garbled_total") == await at.metric("events_failures_total") == 0


async def test_the_engines_own_publisher_is_followed() -> None:
    """vLLM's publisher and event types, over TCP, from before the first message and after a gap."""
    kv_events = pytest.importorskip("vllm.distributed.kv_events")
    ports = (free_port(), free_port())
    publisher = kv_events.ZmqEventPublisher(
        0, f"tcp://*:{ports[0]}", replay_endpoint=f"tcp://*:{ports[1]}", buffer_steps=100, topic="kv"
    )
    stores = told_by_vllm()
    removes = kv_events.BlockRemoved(block_hashes=stores.block_hashes[-1:], medium="GPU", group_idx=0)
    claims = Claims()
    feed = feed_for(claims, ports)
    try:
        publisher.publish(kv_events.KVEventBatch(ts=1.0, events=[stores]))
        async with running(feed):
            await until_async(lambda: claims.keys[Medium.GPU] == set(keys_of(STEM)))
            publisher.publish(kv_events.KVEventBatch(ts=2.0, events=[removes]))
            left = whole_keys([STEM], set(blocks_of(STEM)[:-1]))
            await until_async(lambda: claims.keys[Medium.GPU] == left)
            publisher.publish(kv_events.KVEventBatch(ts=3.0, events=[kv_events.AllBlocksCleared()]))
            await until_async(lambda: not claims.keys[Medium.GPU])
            assert feed.sync.is_exact
    finally:
        publisher.shutdown()


@pytest.mark.parametrize("address", ["tcp://*:5557", "tcp://host", "host:5557", "http://host:1/"])
def test_an_address_that_can_not_be_connected_to_is_refused(address: str) -> None:
    """A wildcard is what the engine binds, not what a router connects to."""
    with pytest.raises(ConfigError, match="connect"):
        EventFeed(World(1).follower, address, "")
