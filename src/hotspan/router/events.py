"""KV events of one replica: a ZMQ subscription, and replays of missed messages.

    SUB     <- [topic, number, payload]                            each step of the engine that changed its cache
    DEALER  -> ["", first number]   <- ["", topic, number, payload] ...  ["", "", -1, ""]

When a connection ends, the next one has a new socket, so that no message of a replica that is gone is read as one of
its successor's. event_sync.py applies the messages.
"""

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator, Mapping
from typing import ClassVar

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from hotspan.config.kv_events import CurveKeys
from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB
from hotspan.router.event_sync import EventSync

logger = logging.getLogger(__name__)

_ADDRESS = re.compile(r"tcp://[^*/]+:\d+|(ipc|inproc)://.+")
_NUMBER_BYTES = 8
_END = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_REPLAY_WAIT_S = 2.0
"""For each message of a replay. A publisher looks for requests ten times per second, or after each message."""

_QUIET_S = 30.0
"""After so long without a message, a replay shows whether one was lost."""

_BATCH = 32
"""Messages that are applied before others of the event loop have their turn."""

_REFUSED = (zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_HEARTBEAT_S = 5.0
_MAX_QUEUED = 100_000
_LARGEST_BYTES = 64 * MIB


class EventFeed:
    """Receives the messages of one replica and passes them to `sync`.

    events, replay: ZMQ addresses; without replay every gap is a loss. topic: of the replica's messages.
    keys:           None follows a publisher without keys; with some, only a publisher that has them is followed.
    garbled:        malformed messages. failures: of connections.

    One engine, which is one data-parallel rank, has one feed.
    """

    COUNTS: ClassVar[Mapping[str, str]] = {
        "messages": "Messages of KV events.",
        "gaps": "Gaps in a replica's messages.",
        "losses": "Gaps that no replay filled.",
        "restarts": "Times that a replica began anew.",
        "garbled": "Messages that could not be read.",
        "failures": "Connections to a replica's events that ended.",
        "duplicates": "Messages that had come before.",
        "ignored_blocks": "Blocks of events in media or KV cache groups that are not followed.",
        "dropped_blocks": "Blocks forgotten, or not taken, for want of memory.",
        "unknown_blocks": "Blocks of events without a known place in a text.",
    }

    def __init__(
        self,
        sync: EventSync,
        events: str,
        replay: str,
        *,
        topic: str = "",
        rng: random.Random | None = None,
        replay_wait_s: float = _REPLAY_WAIT_S,
        keys: CurveKeys | None = None,
    ) -> None:
        """Raises: ConfigError for an address that can't be connected to."""
        for address in (events, replay):
            if address and not _ADDRESS.fullmatch(address):
                raise ConfigError(f"{address!r} is no address to connect to: give one like tcp://10.0.0.5:5557")
        self._events, self._replay_at, self._topic, self._keys = events, replay, topic.encode(), keys
        self.sync = sync
        self._rng = rng or random.Random()
        self._replay_wait_s = replay_wait_s
        self.garbled = self.failures = 0
        self._pause_s = _FIRST_PAUSE_S

    async def run(self) -> None:
        """Follow the replica until cancelled; a connection that fails is made again."""
        context = zmq.asyncio.Context()
        try:
            while True:
                try:
                    await self._follow(context)
                except zmq.ZMQError as error:
                    logger.warning("kv_events_failed replica=%s error=%s", self._events, error)
                except Exception as error:  # one replica's oddities must not end the router
                    logger.exception("kv_events_failed replica=%s error=%s", self._events, type(error).__name__)
                self.failures += 1
                self.sync.disconnected()
                await asyncio.sleep(self._pause_s * (0.5 + self._rng.random()))
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        finally:
            context.destroy(0)

    def counts(self) -> dict[str, int]:
        """The values of COUNTS."""
        sync, blocks = self.sync, self.sync.blocks
        own = {"garbled": self.garbled, "failures": self.failures}
        own |= {f"{name}_blocks": getattr(blocks, name) for name in ("ignored", "dropped", "unknown")}
        return {name: own[name] if name in own else getattr(sync, name) for name in self.COUNTS}

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _follow(self, context: zmq.asyncio.Context) -> None:
        """One connection, until it ends."""
        async with self._subscribed(context) as (subscriber, monitor):
            while (told := _told(await monitor.recv_multipart())) != zmq.EVENT_HANDSHAKE_SUCCEEDED:
                if told in _REFUSED:
                    raise zmq.ZMQError(msg="it hung up in the handshake: give replica and router one --kv-events-key")
            self._pause_s = _FIRST_PAUSE_S
            await self._catch_up(context, self.sync.connected())
            while await self._listen(context, subscriber, monitor):
                await asyncio.sleep(0)

    async def _listen(
        self, context: zmq.asyncio.Context, subscriber: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket
    ) -> bool:
        """Apply what comes next, some messages at most; False if the connection is over."""
        poller = zmq.asyncio.Poller()
        poller.register(subscriber, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        if not await poller.poll(round(1000 * _QUIET_S)):
            if self._replay_at:
                await self._catch_up(context, self.sync.connected())
            return True
        waiting: zmq.Socket[bytes] = zmq.Socket.shadow(subscriber)
        ended: zmq.Socket[bytes] = zmq.Socket.shadow(monitor)
        for _ in range(_BATCH):
            try:
                frames = waiting.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                frames = []
            # Only now: a message of the next life can't be read before the end of this one has been said.
            if ended.poll(0) and _told(ended.recv_multipart()) == zmq.EVENT_DISCONNECTED:
                return False
            if not frames:
                break
            if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
                self.garbled += 1
                continue
            start = self.sync.live(int.from_bytes(frames[1], "big"), frames[2])
            if start is not None:
                await self._catch_up(context, start)
        return True

    async def _catch_up(self, context: zmq.asyncio.Context, start: int | None) -> None:
        """Replay until nothing is missing, or it is clear that it stays so."""
        while start is not None:
            is_whole = bool(self._replay_at) and await self._replay(context, start)
            start = self.sync.replay_ended(is_whole=is_whole)
        while self.sync.fill():
            await asyncio.sleep(0)

    async def _replay(self, context: zmq.asyncio.Context, start: int) -> bool:
        """Hand on what is replayed from a number on; whether it came to its end."""
        dealer = context.socket(zmq.DEALER)
        try:
            dealer.setsockopt(zmq.LINGER, 0)
            dealer.setsockopt(zmq.RCVHWM, 0)
            dealer.setsockopt(zmq.IPV6, 1)
            if self._keys is not None:
                self._keys.follow(dealer)
            dealer.connect(self._replay_at)
            await dealer.send_multipart([b"", start.to_bytes(_NUMBER_BYTES, "big")])
            waiting: zmq.Socket[bytes] = zmq.Socket.shadow(dealer)
            while await dealer.poll(round(1000 * self._replay_wait_s)):
                for _ in range(_BATCH):
                    try:
                        frames = waiting.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        break
                    if len(frames) < 2 or len(frames[-2]) != _NUMBER_BYTES:
                        self.garbled += 1
                        return False
                    if frames[-2] == _END:
                        return True
                    self.sync.replayed(int.from_bytes(frames[-2], "big"), frames[-1])
                await asyncio.sleep(0)
            return False
        finally:
            dealer.close(0)

    @contextlib.asynccontextmanager
    async def _subscribed(
        self, context: zmq.asyncio.Context
    ) -> AsyncIterator[tuple[zmq.asyncio.Socket, zmq.asyncio.Socket]]:
        """A subscription on its way, and what says when it is there and when it is over."""
        subscriber = context.socket(zmq.SUB)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.RCVHWM: _MAX_QUEUED,
            zmq.MAXMSGSIZE: _LARGEST_BYTES,
            zmq.HEARTBEAT_IVL: round(1000 * _HEARTBEAT_S),
            zmq.HEARTBEAT_TIMEOUT: round(3000 * _HEARTBEAT_S),
            zmq.RECONNECT_IVL: round(1000 * _FIRST_PAUSE_S),
            zmq.RECONNECT_IVL_MAX: round(1000 * _LONGEST_PAUSE_S),
        }
        monitor = subscriber.get_monitor_socket(sum((zmq.EVENT_HANDSHAKE_SUCCEEDED, *_REFUSED)))
        try:
            for option, value in options.items():
                subscriber.setsockopt(option, value)
            if self._keys is not None:
                self._keys.follow(subscriber)
            subscriber.setsockopt(zmq.SUBSCRIBE, self._topic)
            subscriber.connect(self._events)
            yield subscriber, monitor
        finally:
            subscriber.disable_monitor()
            monitor.close(0)
            subscriber.close(0)


def _told(message: list[bytes]) -> int:
    """The event of a message of a socket's monitor."""
    return int(parse_monitor_message(message)["event"])
