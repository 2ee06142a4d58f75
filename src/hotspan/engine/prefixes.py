"""The engine's own prefix cache, as far as forgetting needs it: which texts lie there, and on what terms.

The engine knows its blocks by hash and nothing of tenants or tags. Here each request leaves its text in spans of a
chunk, with the terms on which it uses them, so that an invalidation finds the blocks and what stands on them:

    tagged request:   [h0 h1] <- [h2 h3] <- [h4]        a span is named by its last hash: h1, h3, h4
    another one:      [h0 h1] <- [h2 h3] <- [h5 h6]     if h3 goes, so do h4 and h6
"""

import heapq
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from hashlib import sha256

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id
from vllm.v1.request import Request

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey

_PRUNE_ABOVE = 1024


@dataclass(slots=True)
class Span:
    """Blocks of one chunk, or of the last piece of a text that is no whole one."""

    hashes: list[BlockHash]
    parent: bytes | None
    terms: Terms


@dataclass(slots=True)
class Running:
    """A request that has not ended. terms: its own, on the whole of its text."""

    request: Request
    terms: Terms


class GpuPrefixes:
    """What may be found in the engine's prefix cache. One thread (the scheduler's) calls it.

    groups:      KV cache groups. span_hashes: block hashes of a chunk.
    """

    def __init__(self, groups: int = 1, span_hashes: int = 1) -> None:
        self._pool: BlockPool | None = None
        self._groups = groups
        self._step = span_hashes
        self._running: dict[str, Running] = {}
        self._spans: dict[bytes, Span] = {}
        self._expiries: list[tuple[int, bytes]] = []

    def bind(self, pool: BlockPool) -> None:
        """The engine's pool, once it is made."""
        self._pool = pool

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self, request: Request, terms: Terms) -> None:
        """A request is about to come."""
        self._running[request.request_id] = Running(request, terms)

    def terms(self, request: Request, index: int) -> Terms | None:
        """The terms of the chunk at `index` of a request's text, if it may lie in the cache."""
        end = (index + 1) * self._step
        span = self._spans.get(request.block_hashes[end - 1]) if end <= len(request.block_hashes) else None
        return None if span is None else span.terms

    def keep(self, request: Request, terms_at: Callable[[int], Terms]) -> None:
        """What a request has computed so far, or is about to, may stay in the cache on these terms by chunk index."""
        parent: bytes | None = None
        hashes = request.block_hashes
        for index, start in enumerate(range(0, len(hashes), self._step)):
            part, terms = hashes[start : start + self._step], terms_at(index)
            span = self._spans.get(part[-1])
            if span is None:
                span = self._spans[part[-1]] = Span(part, parent, terms)
            elif terms is not span.terms:
                span.terms = span.terms.joined(terms)
            if terms.expires_s:
                heapq.heappush(self._expiries, (span.terms.expires_s, part[-1]))
            parent = part[-1]

    def end(self, request: Request, terms_at: Callable[[int], Terms]) -> None:
        """A request ended."""
        if self._running.pop(request.request_id, None) is not None:
            self.keep(request, terms_at)
            if len(self._spans) > max(_PRUNE_ABOVE, 2 * (self._pool.num_gpu_blocks if self._pool is not None else 0)):
                self._prune()

    # -- forgetting --------------------------------------------------------------------------------------------------

    def invalidate(self, scope: Scope, named: frozenset[bytes] = frozenset()) -> tuple[int, set[str]]:
        """Drop what a scope takes (`named`: the spans of its keys): how many blocks, and which running requests it hit.

        Those requests go on under names that nobody can ask for: what they still compute is never found.
        """
        by_name = scope.keys is not None
        scope, namespace = replace(scope, keys=None), scope.namespace or b""
        taken = {
            name
            for name, span in self._spans.items()
            if (not by_name or name in named) and scope.takes(ChunkKey(name), namespace, span.terms)
        }
        hit = {
            name
            for name, running in self._running.items()
            if not by_name and scope.takes(ChunkKey(b""), namespace, running.terms)
        }
        return self._drop(taken, hit)

    def expire(self, now_s: float) -> int:
        """Drop the texts whose time is over; returns how many blocks."""
        taken: set[bytes] = set()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, name = heapq.heappop(self._expiries)
            span = self._spans.get(name)
            if span is not None and 0 < span.terms.expires_s <= now_s:
                taken.add(name)
        return self._drop(taken, set())[0] if taken else 0

    def forget(self, request: Request, start: int) -> int:
        """Drop one request's blocks from hash `start` on: it asked that nothing of it be stored."""
        return self._evict(request.block_hashes[start:])

    # -- inside ----------------------------------------------------------------------------------------------------

    def _drop(self, taken: set[bytes], hit: set[str]) -> tuple[int, set[str]]:
        """Evict these spans and all that stands on them, and rename the running requests concerned."""
        taken |= self._descendants(taken)
        fallen = [name for span in taken for name in self._spans.pop(span).hashes]
        for name, running in self._running.items():
            hashes = running.request.block_hashes
            first = next((n for n, hash_ in enumerate(hashes) if hash_ in taken), 0 if name in hit else None)
            if first is not None:
                fallen += hashes[first // self._step * self._step :]
                hit.add(name)
        dropped = self._evict(fallen)
        for name in hit:
            _rename(self._running[name].request)
        return dropped, hit

    def _descendants(self, names: set[bytes]) -> set[bytes]:
        children: dict[bytes, list[bytes]] = {}
        for name, span in self._spans.items():
            if span.parent is not None:
                children.setdefault(span.parent, []).append(name)
        found: set[bytes] = set()
        todo = list(names)
        while todo:
            fresh = [child for child in children.get(todo.pop(), ()) if child not in found]
            found.update(fresh)
            todo.extend(fresh)
        return found

    def _prune(self) -> None:
        """Know only what is still in the cache."""
        self._spans = {
            name: span
            for name, span in self._spans.items()
            if any(next(self._blocks(hash_), None) is not None for hash_ in span.hashes)
        }

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


def _rename(request: Request) -> None:
    """Give a running request's blocks names that no other request can have; those to come are chained to them."""
    secret = os.urandom(16)
    request.block_hashes[:] = [
        BlockHash(sha256(secret + n.to_bytes(4, "little")).digest()) for n in range(len(request.block_hashes))
    ]
