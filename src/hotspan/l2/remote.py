"""The L2 tier: chunks in a store that all replicas share (l2), as frames, behind the log they share.

What is there must be asked for: `ask` begins that, and what the answer names is known from then on (known.py). Known
chunks may be loaded; a chunk that was taken by an invalidation, that expired, or whose ancestors are not all there is
not known (view.py). Every frame is verified against the record it was found with: what is not its own is a miss, and
deleted (jobs.py).

    RemoteTier    the scheduler's thread: what is asked for, stored and updated
      KnownChunks   what may be loaded, and what is not there; holds until the log says more about a tenant
      LogFollower   how far the log was read; outlives the tier
        LogView       what the log says of one chunk
        PendingUpdates  what hits added and the store does not have
      StoreJobs     the I/O threads
"""

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Compress, Tier
from hotspan.l2.base import ObjectStore, StoreUsage, updates_of
from hotspan.l2.follower import LogFollower
from hotspan.l2.jobs import DROPPED, Ended, StoreJobs
from hotspan.l2.known import KnownChunks, Moment
from hotspan.l2.questions import Answer, Questions
from hotspan.l2.store_clock import StoreClock
from hotspan.l2.view import readable
from hotspan.tiers.base import Durable, Fault, FrameKeys, Losses, TierUsage, Transfer
from hotspan.tiers.commit import GroupCommit
from hotspan.tiers.io import IoQueue, IoThreads
from hotspan.tiers.packer import Packer
from hotspan.tiers.record import Record

logger = logging.getLogger(__name__)

_MAX_KNOWN = 1 << 16
_UPDATES_AT_ONCE = 256
"""Keys in one call of the store, which has its deadline: an object store writes one object for a chain's updates."""

_MARK_GIVEN_UP_S = 10.0
"""How long a chunk's updates may fail alone, while the log can be read, before the chunk is invalidated."""

_USAGE_EVERY_S = 5.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How to use a store.

    store:       closed with the tier.
    follower:    of the store's log; it outlives the tier.
    threads:     that move frames. store_depth: stores in flight.
    keys:        None writes plain frames.
    compress:    whether chunks are compressed (tiers/compressing.py). Compressed ones are read in any case.
    queue:       makes the I/O threads, or stands in for them.
    """

    store: ObjectStore
    follower: LogFollower
    threads: int = 4
    store_depth: int = 16
    keys: FrameKeys | None = None
    compress: Compress = "never"
    queue: Callable[[str, int, int], IoQueue] = IoThreads


class RemoteTier:
    """A StorageTier over an object store."""

    tier = Tier.L2

    def __init__(
        self, options: RemoteOptions, namespace: bytes, payload_bytes: int, clock: Clock | None = None
    ) -> None:
        if payload_bytes % PAGE_BYTES:
            raise ValueError(f"a payload is whole pages of {PAGE_BYTES} bytes, not {payload_bytes}")
        self._namespace = namespace
        self._payload_bytes = payload_bytes
        self._store = options.store
        self._follower = follower = options.follower
        self._store_depth = options.store_depth
        self._updates = follower.updates
        self._clock = StoreClock(clock or SystemClock(), lambda: follower.clock_offset_s)
        packer = Packer(options.compress, options.threads, self._clock)
        self._jobs = StoreJobs(options.store, lambda: follower.view, options.keys, self._clock, packer)
        self._known = KnownChunks(follower, _MAX_KNOWN, self._clock)
        self._asking = Questions(self._clock)
        self._storing: dict[ChunkKey, bool] = {}  # whether it is still wanted
        self._is_updating = self._is_measuring = False
        self._updates_at_once = _UPDATES_AT_ONCE
        self._failing: dict[ChunkKey, float] = {}  # since when the updates of a chunk can't be written, each alone
        self._usage, self._usage_s = StoreUsage(), -_USAGE_EVERY_S
        self.losses = Losses()
        self._done: deque[Callable[[], Transfer | None]] = deque()
        self._landed = threading.Event()
        scratch = HEADER_BYTES + (payload_bytes + PAGE_BYTES if options.keys is not None else 0) + payload_bytes
        self._queue = options.queue("l2", options.threads, scratch)
        self._log_queue = options.queue("l2-log", 1, HEADER_BYTES)
        self._commits = GroupCommit(self._log_queue, lambda number, scopes: follower.append(scopes))
        self._closed = False

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def asking(self) -> int:
        return len(self._asking)

    @property
    def answer_s(self) -> float:
        return self._asking.answer_s

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        unknown = {chunk.key for chunk in chunks if not self.lookup(chunk.key) and not self._known.is_absent(chunk.key)}
        unknown -= self._asking.keys
        if unknown and self._follower.is_fresh:
            began_s = self._asking.begin(unknown)
            asked = tuple(chunks)
            self._submit(
                lambda scratch: Answer(self._jobs.find(asked, tenant), self._clock.monotonic() - began_s),
                partial(self._answered, self._namespace, asked, tenant, unknown, self._known.now()),
                dropped=Answer(None, 0.0),
                urgent=True,
            )

    def is_asking(self, key: ChunkKey) -> bool:
        return key in self._asking

    def lookup(self, key: ChunkKey) -> bool:
        found = self._known.get(key)
        if found is None or not self._follower.is_fresh:
            return False
        return not found.terms.expires_s or self._clock.unix() < found.terms.expires_s

    def terms(self, key: ChunkKey) -> Terms:
        found = self._known.get(key)
        if found is None:
            raise KeyError(key)
        return self._clock.here(found.terms)

    # -- transfers -------------------------------------------------------------------------------------------------

    def labelled(self, scope: Scope) -> list[Chunk]:
        return []  # a store knows chunks by name alone

    def can_store(self) -> bool:
        return len(self._storing) < self._store_depth and self._follower.is_fresh

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        return self._commits.hold_back(key, self._namespace, terms)

    def released(self) -> list[ChunkKey]:
        return self._commits.released()

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        self._check_size(payload)
        is_known = chunk.key in self._storing or self.lookup(chunk.key)
        if is_known or chunk.key in self._known.unwritable or not self.can_store():
            return False
        if self._commits.takes(chunk.key, self._namespace, terms):
            return False  # the log's readers would count it as of before
        terms = self._clock.there(terms).at(self._follower.applied)
        stamp = secrets.randbits(64)
        record = Record(chunk.key, chunk.parent, self._namespace, self._payload_bytes, terms, stamp, chunk.index)
        self._storing[chunk.key] = True
        put = partial(self._jobs.put, record, payload=payload, is_bad=self._known.unreadable.has_failed(chunk.key))
        self._submit(put, partial(self._stored, record), dropped=DROPPED)
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        self._check_size(into)
        found = self._known.get(key)
        if found is None or not self.lookup(key):
            return False
        self._submit(
            lambda scratch: self._jobs.get(found, scratch, into),
            partial(self._loaded, found.record),
            dropped=DROPPED,
            urgent=True,
        )
        return True

    def finished(self) -> list[Transfer]:
        self._landed.clear()
        transfers: list[Transfer] = []
        while self._done:
            transfer = self._done.popleft()()
            if transfer is not None:
                transfers.append(transfer)
        self._submit_updates(self._updates_at_once)
        now = self._clock.monotonic()
        if now - self._usage_s >= _USAGE_EVERY_S and not self._is_measuring:
            self._usage_s, self._is_measuring = now, True  # it may take minutes where there is much
            self._submit(lambda scratch: self._jobs.usage(), self._measured, dropped=None)
        return transfers

    def wait(self, timeout_s: float) -> bool:
        return self._landed.wait(timeout_s)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        return  # the store sees for itself what is read

    # -- terms -----------------------------------------------------------------------------------------------------

    def join(self, key: ChunkKey, terms: Terms) -> None:
        found, terms = self._known.get(key), self._clock.there(terms)
        if found is not None:
            joined = found.terms.joined(terms)
            if joined is found.terms:
                return
            self._known.change(replace(found, terms=joined.at(self._follower.applied)))
        elif key not in self._storing and self._known.is_absent(key) and not self._known.is_gap(key):
            return  # who stores it next says so with the record; what lies behind a gap goes with the gap's chunk
        if terms.labels or terms.expires_s or terms.is_wild:
            forgotten = self._updates.add(key, terms.at(self._follower.applied))
            if forgotten is not None:  # who hit what of it is not known any more: nothing of the tenant may stay
                self.invalidate([Scope(tenant=forgotten)], lambda done: None)

    def discard(self, key: ChunkKey) -> None:
        if key in self._storing:
            self._storing[key] = False
        found = self._known.pop(key)
        self._delete([key], found.record.terms.tenant if found is not None else 0)

    def invalidate(self, scopes: Sequence[Scope], durable: Durable) -> int:
        asked = ScopeSet(scopes)
        forgotten = self._known.pop_tenants(asked.concerns)  # what stands on those that go is not told apart here
        taken = sum(asked.takes(one.record.key, self._namespace, one.terms) for one in forgotten)
        self._commits.submit(scopes, durable)
        return taken

    def rename(self, namespace: bytes, *, forget: bool) -> None:
        """As StorageTier says. What nobody will look for stays until the store evicts it."""
        if namespace != self._namespace:
            self._queue.drop()
            self._namespace = namespace
            deque(self._known.pop_tenants(lambda tenant: True), maxlen=0)

    def usage(self) -> TierUsage:
        usage = self._usage
        chunks = usage.capacity_bytes // (HEADER_BYTES + self._payload_bytes)
        counts = usage.evicted is not None
        return TierUsage(usage.objects, chunks, usage.bytes, usage.capacity_bytes, {}, counts_evictions=counts)

    def give_up(self) -> None:
        self._queue.drop()
        self._commits.give_up()

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(timeout_s)
        self._submit_updates(at_most=None)
        for queue in (self._queue, self._log_queue):
            queue.close(deadline.rest_s())
        self._store.close()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (for tests; call with no transfer unreported)."""
        if not self._queue.drain(5.0) or self.finished() or self._storing or self._asking:
            raise AssertionError("a transfer or an answer is in flight")
        self._known.check()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _submit(
        self,
        job: Callable[[memoryview], _T],
        done: Callable[[_T], Transfer | None],
        *,
        dropped: _T,
        urgent: bool = False,
    ) -> None:
        """Run a job on an I/O thread, then `done` on the scheduler's, with what it returned.

        dropped: given to `done` if the job is never begun.
        """
        self._queue.submit(
            lambda scratch: self._report(partial(done, job(scratch))),
            lambda: self._report(partial(done, dropped)),
            urgent=urgent,
        )

    def _report(self, done: Callable[[], Transfer | None]) -> None:
        self._done.append(done)
        self._landed.set()

    def _answered(
        self,
        namespace: bytes,
        chunks: Sequence[Chunk],
        tenant: int,
        unknown: set[ChunkKey],
        since: Moment,
        answer: Answer,
    ) -> None:
        found = answer.found
        self._asking.end(unknown, answer.seconds)
        if found is None or namespace != self._namespace or not self._holds(since, tenant):
            return  # nothing, or what may have been invalidated since
        now_s = self._clock.unix()
        alive, dead = readable(chunks, found, self._follower.view, self._namespace, self._payload_bytes, now_s)
        for one in (each for each in alive if each.record.key not in self._known.unreadable):
            self._known.put(self._updates.joined(one), since)
        if dead:
            self._delete(dead, tenant)
            over = {key for key in unknown.intersection(dead) if 0 < found[key].terms.expires_s <= now_s}
            self.losses.expired += len(over)
        self._known.put_absent(chunks, unknown)

    def _holds(self, since: Moment, tenant: int) -> bool:
        """Whether nothing of a tenant was invalidated since then, nor is about to be."""
        return self._known.holds(since, tenant) and not self._commits.concerns(tenant)

    def _stored(self, record: Record, ended: Ended) -> Transfer:
        is_wanted = self._storing.pop(record.key)
        ended = ended._replace(fault=self._known.unwritable.judge(record.key, ended.fault))
        since = self._known.now()._replace(generation=record.terms.generation)
        is_here = record.namespace == self._namespace  # else it lies there under its own name
        if ended.fault is None and not is_wanted:
            self._delete([record.key], record.terms.tenant)
        elif ended.found is not None and is_here and self._holds(since, record.terms.tenant):
            self._known.unreadable.forgive(record.key)
            self._known.put(self._updates.joined(ended.found), since)
        return self._transfer(record.key, ended, is_load=False)

    def _loaded(self, record: Record, ended: Ended) -> Transfer:
        ended = ended._replace(fault=self._known.loaded(record.key, ended.fault))
        if ended.fault is Fault.CORRUPT:
            self._delete([record.key], record.terms.tenant)
        return self._transfer(record.key, ended, is_load=True)

    def _transfer(self, key: ChunkKey, ended: Ended, *, is_load: bool) -> Transfer:
        size = self._payload_bytes if ended.fault is None else 0
        return Transfer(key, is_load, ended.fault, size, ended.seconds, ended.packing, ended.ended_s)

    def _submit_updates(self, at_most: int | None) -> None:
        if self._updates and not self._is_updating:
            self._is_updating = True
            updates = self._updates.oldest(at_most)
            # An object that is not known here may have been invalidated: a hit of another copy does not undo that.
            packed = {
                key: updates_of(each, each.generation if self._known.get(key) else 0) for key, each in updates.items()
            }
            self._submit(lambda scratch: self._jobs.add_updates(packed), partial(self._updated, updates), dropped=False)

    def _updated(self, updates: Mapping[ChunkKey, Terms], is_written: bool) -> None:
        self._is_updating = False
        if is_written:
            self._updates_at_once = min(2 * self._updates_at_once, _UPDATES_AT_ONCE)
            self._drop_updates(updates)
        elif len(updates) > 1:  # one chunk whose updates can't be written must not hold up the others
            self._updates_at_once = len(updates) // 2
        else:
            self._updates_at_once = 1
            self._put_off(updates)

    def _put_off(self, updates: Mapping[ChunkKey, Terms]) -> None:
        """Updates of one chunk failed: the others come first; after a while the chunk is invalidated in their place."""
        (key,) = updates
        self._updates.defer(key)
        now_s = self._clock.monotonic()
        if now_s - self._failing.setdefault(key, now_s) >= _MARK_GIVEN_UP_S and self._follower.is_fresh:
            self._failing[key] = now_s
            logger.warning("l2_updates_given_up key=%s reason=chunk_invalidated", key.hex())
            # Who hit it is then not known to other replicas, so neither it nor what stands on it may stay.
            self.invalidate([Scope(keys=frozenset(updates))], partial(self._given_up, updates))

    def _given_up(self, updates: Mapping[ChunkKey, Terms], is_durable: bool) -> None:
        if is_durable:  # said on the log's thread; updates are the scheduler's
            self._report(partial(self._drop_updates, updates))

    def _drop_updates(self, updates: Mapping[ChunkKey, Terms]) -> None:
        self._updates.remove(updates)
        for key in updates:
            self._failing.pop(key, None)

    def _measured(self, usage: StoreUsage | None) -> None:
        self._is_measuring = False
        self._usage = usage or self._usage
        self.losses.evicted = self._usage.evicted or 0

    def _delete(self, keys: Sequence[ChunkKey], tenant: int) -> None:
        self._queue.submit(lambda scratch: self._jobs.delete(keys, tenant), lambda: None, urgent=False)

    def _check_size(self, buffer: memoryview) -> None:
        if len(buffer) != self._payload_bytes:
            raise ValueError(f"the buffer has {len(buffer)} bytes, not {self._payload_bytes}")
