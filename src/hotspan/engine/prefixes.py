"""The engine's own prefix cache, as far as forgetting needs it: which texts are in it, and on what terms.

The engine knows its blocks by hash and nothing of tenants or tags. Here each request leaves its text in spans of a
chunk, with the terms on which it uses them, so that an invalidation finds the blocks and their descendants:

    tagged request:   [h0 h1] <- [h2 h3] <- [h4]        a span is named by its last hash: h1, h3, h4
    another one:      [h0 h1] <- [h2 h3] <- [h5 h6]     if h3 goes, so do h4 and h6
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from hotspan.core.multimap import Multimap
from hotspan.core.terms import Scope, Terms
from hotspan.engine.requests import RequestRecord
from hotspan.engine.spans import Span, Spans

_PRUNE_ABOVE, _PRUNE_SHARE = 1024, 2
"""With so many spans beyond what fills the pool, each new one has this many others looked up in the pool."""

_HASH_BYTES = 32


class GpuPrefixes:
    """What may be found in the engine's prefix cache. One thread (the scheduler's) calls it.

    groups: KV cache groups. span_hashes: block hashes of a chunk. hash_tokens: tokens of a block hash.
    """

    def __init__(self, groups: int = 1, span_hashes: int = 1, hash_tokens: int = 1) -> None:
        self._pool: BlockPool | None = None
        self._groups = groups
        self._step = span_hashes
        self._hash_tokens = hash_tokens
        self._running: dict[str, RequestRecord] = {}
        self._users = Multimap[bytes, str]()  # running requests by the spans of their texts
        self.spans = Spans()

    def bind(self, pool: BlockPool) -> None:
        """The engine's pool, once it is made."""
        self._pool = pool

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self, record: RequestRecord) -> None:
        """A request is about to come."""
        name = record.request.request_id
        if name in self._running:
            self._leave(name)
        self._running[name] = record
        self._note_spans(record)

    def terms(self, record: RequestRecord, index: int) -> Terms | None:
        """The terms of the chunk at `index` of a request's text, if it may be in the cache."""
        end, hashes = (index + 1) * self._step, record.request.block_hashes
        return self.spans.terms(hashes[end - 1]) if end <= len(hashes) else None

    def keep(self, record: RequestRecord) -> None:
        """What a request has computed so far, or is about to, may stay in the cache on its terms.

        Spans of a running request are kept once: the terms stay the same, and whoever drops one renames the request.
        """
        hashes, step = record.request.block_hashes, self._step
        if self._running.get(record.request.request_id) is record:
            self._note_spans(record)
        first = 0 if record.is_renamed else record.spans_kept
        parent: bytes | None = hashes[first * step - 1] if first else None
        indexes = range(first, -(-len(hashes) // step))
        for index, keys in zip(indexes, record.keys_at(indexes), strict=True):
            part = tuple(hashes[index * step : (index + 1) * step])
            self.spans.keep(Span(part[-1], part, parent, record.terms_at(index), keys))
            parent = part[-1]
        if len(self.spans) > _PRUNE_ABOVE + (self._pool.num_gpu_blocks // step if self._pool is not None else 0):
            self.spans.prune(_PRUNE_SHARE * (len(hashes) // step - first + 1), self._may_be_found)
        record.spans_kept = len(hashes) // step

    def end(self, record: RequestRecord) -> None:
        """A request ended. What it may not store leaves the cache at once."""
        if self._running.get(record.request.request_id) is record:
            self.keep(record)
            self._leave(record.request.request_id)
        if not record.may_store:
            self._evict(record.request.block_hashes[record.kept_tokens // self._hash_tokens :])

    # -- forgetting --------------------------------------------------------------------------------------------------

    def invalidate(self, scopes: Sequence[Scope], namespace: bytes, hit: Mapping[str, int]) -> tuple[int, set[str]]:
        """Drop what any of these scopes takes: how many blocks, and which running requests that concerns.

        hit: those that are known to be concerned, though nothing of them may be in the cache yet, and from which chunk
             of their text on.

        They go on under random names: what they still compute is never found.
        """
        return self._drop(self.spans.matched(scopes, namespace), hit)

    def forget_all(self) -> int:
        """Empty the cache, also of what running requests have in it; returns how many known blocks were dropped.

        They go on under random names, and so does what they still compute.
        """
        dropped, _ = self._drop(self.spans.names(), dict.fromkeys(self._running, 0))
        if self._pool is not None:
            self._pool.evict_blocks({block.block_id for block in self._pool.blocks})  # what has no span, too
        return dropped

    def withdraw(self, record: RequestRecord, start: int) -> None:
        """A request that comes leaves nothing from the chunk at `start` on: its blocks get random names."""
        self._rename(record, set(), start)

    def expire(self, now_s: float) -> None:
        """Drop the texts whose time is over."""
        if expired := self.spans.expired(now_s):
            self._drop(expired, {})

    def check(self) -> None:
        """Raise AssertionError if spans and running requests do not agree."""
        self.spans.check()
        used = {(name, request_id) for request_id, record in self._running.items() for name in record.spans}
        if used != {(name, request_id) for name in self._users for request_id in self._users.of(name)}:
            raise AssertionError("spans and running requests know each other differently")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _drop(self, names: set[bytes], hit: Mapping[str, int]) -> tuple[int, set[str]]:
        """Evict these spans, and rename the running requests concerned."""
        users = set(hit)
        dropped: list[bytes] = []
        pieces: dict[bytes | None, set[bytes]] = {}  # by the span before them
        for name in names:
            span = self.spans.pop(name)
            dropped += span.hashes
            users |= self._users.of(name)
            if len(span.hashes) < self._step:  # a piece: it may be the beginning of a chunk of others
                pieces.setdefault(span.parent, set()).add(name)
        users.update(self._going_on(pieces))
        for request_id in users & self._running.keys():
            dropped += self._rename(self._running[request_id], names, hit.get(request_id))
        return self._evict(dropped), users

    def _going_on(self, pieces: Mapping[bytes | None, set[bytes]]) -> Iterator[str]:
        """Running requests whose texts go on where one of these pieces ends; each text is looked through once."""
        users = (self._running if parent is None else self._users.of(parent) for parent in pieces)
        for request_id in set().union(*users):
            record = self._running[request_id]
            for at, parent in enumerate([None, *record.spans]):
                names = pieces.get(parent)
                if names is not None:
                    following = record.request.block_hashes[at * self._step : (at + 1) * self._step]
                    if not names.isdisjoint(following):
                        yield request_id
                        break

    def _rename(self, record: RequestRecord, dropped: set[bytes], start: int | None) -> list[bytes]:
        """Give a request's blocks names that no other can have, and those to come; returns the names to be evicted.

        start: the first chunk concerned, if the request is for another reason than that it uses one that is dropped.
        """
        hashes = list(record.request.block_hashes)
        first = next((n // self._step for n, name in enumerate(hashes) if name in dropped), None)
        first = min((n for n in (first, start) if n is not None), default=0)
        self._forget_spans(record)
        record.is_renamed = True
        noise = os.urandom(_HASH_BYTES * len(hashes))
        record.request.block_hashes[:] = [
            BlockHash(noise[at : at + _HASH_BYTES]) for at in range(0, len(noise), _HASH_BYTES)
        ]
        return hashes[first * self._step :]

    def _note_spans(self, record: RequestRecord) -> None:
        """Know the request by the spans of its text."""
        hashes, names = record.request.block_hashes, record.spans
        for end in range((len(names) + 1) * self._step, 0 if record.is_renamed else len(hashes) + 1, self._step):
            names.append(hashes[end - 1])
            self._users.add(hashes[end - 1], record.request.request_id)

    def _forget_spans(self, record: RequestRecord) -> None:
        for name in record.spans:
            self._users.discard(name, record.request.request_id)
        record.spans.clear()

    def _leave(self, request_id: str) -> None:
        self._forget_spans(self._running.pop(request_id))

    def _may_be_found(self, span: Span) -> bool:
        """Whether blocks of a span are in the pool, or a running request may still compute some."""
        if span.name in self._users:
            return True
        if self._pool is None:
            return False
        find = self._pool.cached_block_hash_to_block.get_one_block
        groups = range(self._groups)
        return any(find(make_block_hash_with_group_id(name, of)) is not None for name in span.hashes for of in groups)

    def _blocks(self, name: bytes) -> Iterator[int]:
        """The block of a hash in each KV cache group that has it: one of several, if it was computed side by side."""
        if self._pool is not None:
            for group in range(self._groups):
                key = make_block_hash_with_group_id(BlockHash(name), group)
                block = self._pool.cached_block_hash_to_block.get_one_block(key)
                if block is not None:
                    yield block.block_id

    def _evict(self, hashes: Iterable[bytes]) -> int:
        evicted: set[int] = set()
        for name in hashes:
            while (fresh := set(self._blocks(name)) - evicted) and self._pool is not None:
                self._pool.evict_blocks(fresh)
                evicted |= fresh
        return len(evicted)
