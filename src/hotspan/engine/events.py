"""vLLM's KV events for the chunks in hotspan's tiers: stored, removed, and in which medium.

The engine publishes its pool's blocks with the medium GPU. Here each chunk is a block, named by the end of its key,
with its parent and its tokens, so that a router that missed the engine's event still knows the text.

Chunks that leave RAM are published at once. What comes to the lower tiers and leaves them is found by looking at a few
chunks per step: a router that learns of it some seconds late chooses a little worse, and the tiers need no hooks.

They are published by vLLM's publisher: to subscribers with the key only, and on loopback where that is asked.
"""

from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import zmq
from vllm.distributed.kv_events import (
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVCacheEvent,
    ZmqEventPublisher,
)
from vllm.v1.core.block_pool import BlockPool
from zmq.auth.thread import ThreadAuthenticator

from hotspan.cache.tiered import TieredCache
from hotspan.config.kv_events import DOMAIN, CurveKeys, is_local, read_key
from hotspan.core.types import Chunk, ChunkKey, Tier
from hotspan.engine.compat import extra_keys
from hotspan.engine.requests import ChunkGroup, RequestRecord

_MEDIA = {Tier.RAM: "CPU", Tier.DISK: "DISK", Tier.L2: "L2"}
_LOOKED_AT = 16
"""Chunks a step: about 20 us."""


class ChunkEvents:
    """The events of one engine. The scheduler's thread calls it.

    group: whose chunks are published, a chain: the chunks of other groups come and go with it.
    """

    def __init__(self, cache: TieredCache, group: ChunkGroup) -> None:
        self._cache = cache
        self._group = group
        # Where each published chunk was; nowhere, until its turn comes.
        self._media: dict[ChunkKey, frozenset[Tier]] = {}
        self._turns: deque[ChunkKey] = deque()
        self._events: list[KVCacheEvent] = []
        cache.ram.gone = deque()

    def publish(self, record: RequestRecord) -> None:
        """Publish the request's chunks that are in a tier and were not published, up to the first that is in none."""
        chunks = record.chain(self._group.index)
        while record.published < len(chunks) and self._publish(record, chunks[record.published]):
            record.published += 1

    def watch(self, pool: BlockPool) -> None:
        """The engine's pool. When it is emptied the engine publishes that all is cleared, and routers forget our
        chunks, too: these are published again with the requests that use them.

        Mutates: the pool, which reports it.
        """
        reset = pool.reset_prefix_cache

        def reset_prefix_cache() -> bool:
            is_done = bool(reset())
            if is_done:
                self._media = dict.fromkeys(self._media, frozenset())
                self._events.clear()
            return is_done

        pool.reset_prefix_cache = reset_prefix_cache

    def take(self) -> list[KVCacheEvent]:
        """What happened since the last call, in order."""
        gone = self._cache.ram.gone
        while gone:
            self._look(gone.popleft())
        for _ in range(min(_LOOKED_AT, len(self._turns))):
            key = self._turns.popleft()
            self._look(key)
            if self._media[key]:
                self._turns.append(key)
            else:
                del self._media[key]
        events, self._events = self._events, []
        return events

    def _publish(self, record: RequestRecord, chunk: Chunk) -> bool:
        """Publish one chunk; whether it is anywhere."""
        known = self._media.get(chunk.key)
        if known:
            return True
        media = self._cache.where(chunk.key)
        if media:
            if known is None:
                self._turns.append(chunk.key)
            self._media[chunk.key] = media
            for tier in _in_order(media):
                self._events.append(self._described(record, chunk, tier))
        return bool(media)

    def _look(self, key: ChunkKey) -> None:
        """Publish what changed of a chunk: first where it came to, so that it is never nowhere on its way down."""
        before = self._media.get(key)
        if not before:
            return
        now = self._media[key] = self._cache.where(key)
        for tier in _in_order(now - before):
            self._events.append(self._stored(key, tier))
        for tier in _in_order(before - now):
            self._events.append(BlockRemoved([_name(key)], _MEDIA[tier]))

    def _described(self, record: RequestRecord, chunk: Chunk, tier: Tier) -> BlockStored:
        """A chunk that routers do not know: with its text, and what else its name depends on."""
        start = chunk.index * self._group.tokens
        stop = start + self._group.tokens
        stored = self._stored(chunk.key, tier)
        stored.parent_block_hash = None if chunk.parent is None else _name(chunk.parent)
        stored.token_ids = list(record.request.all_token_ids[start:stop])
        stored.lora_name = record.adapter
        stored.extra_keys = extra_keys(record.request, start, stop)
        return stored

    def _stored(self, key: ChunkKey, tier: Tier) -> BlockStored:
        return BlockStored(
            block_hashes=[_name(key)],
            parent_block_hash=None,
            token_ids=[],
            block_size=self._group.tokens,
            lora_id=None,
            medium=_MEDIA[tier],
            lora_name=None,
        )


def _in_order(tiers: frozenset[Tier]) -> list[Tier]:
    return [tier for tier in _MEDIA if tier in tiers]


def _name(key: ChunkKey) -> int:
    """A chunk among a replica's blocks: 64 bits of its key, as the engine's own events have them."""
    return int.from_bytes(key[-8:], "big")


# -- the publisher -----------------------------------------------------------------------------------------------------


def offer_publisher(key: Path | None) -> None:
    """Have engines of this process publish by ours. key: a file (config/kv_events.py); None sends to whoever follows.

    Raises: ConfigError for a key that can't be used.
    """
    made = partial(KeyedPublisher, None if key is None else read_key(key))
    EventPublisherFactory._registry["zmq"] = made  # `register_publisher` takes new names only, and the config none


class KeyedPublisher(ZmqEventPublisher):
    """Publishes to followers that show the key; without `keys` as vLLM does, but for loopback addresses."""

    def __init__(self, keys: CurveKeys | None, *given: Any, **named: Any) -> None:
        self._keys = keys
        self._gate: ThreadAuthenticator | None = None
        super().__init__(*given, **named)

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.stop()
            self._ctx.destroy(0)
            self._gate = None

    def _socket_setup(self) -> None:
        if self._keys is None and not is_local(self._endpoint):
            super()._socket_setup()
            return
        if self._keys is not None:
            # A context of its own: whoever asks to follow is asked for in it, and vLLM's other sockets are not.
            self._ctx = zmq.Context()
            self._gate = ThreadAuthenticator(self._ctx)
            self._gate.start()
            self._gate.configure_curve_callback(DOMAIN.decode(), self._keys)
        self._pub = self._socket(zmq.PUB)
        self._pub.set_hwm(self._hwm)
        if is_local(self._endpoint) or "*" in self._endpoint or "::" in self._endpoint:
            self._pub.bind(self._endpoint)
        else:
            self._pub.connect(self._endpoint)
        if self._replay_endpoint is not None:
            self._replay = self._socket(zmq.ROUTER)
            self._replay.bind(self._replay_endpoint)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._ctx.socket(kind)
        if self._keys is not None:
            self._keys.publish(socket)
        return socket
