"""The L2 tier: chunks in a store that all replicas share (l2), as frames, behind the log they share.

What is there must be asked for: `ask` begins that, and what the answer names is known from then on. Known chunks may be
loaded; a chunk that was taken by an invalidation, that expired, or whose ancestors are not all there is not known
(l2/view.py). Every frame is verified against the record it was found with: what is not its own is a miss, and
deleted.
"""

import errno
import logging
import secrets
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.frame import (
    HEADER_BYTES,
    FrameFault,
    FrameIdentity,
    seal,
    segments,
    verify,
    verify_header,
    verify_part,
)
from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import PAGE_BYTES, Chunk, ChunkKey, Tier
from hotspan.l2.base import Found, ObjectStore, StoreUsage, marks_of
from hotspan.l2.follower import LogFollower
from hotspan.l2.known import KnownChunks, Moment
from hotspan.l2.view import is_of, readable
from hotspan.tiers.base import Durable, Fault, FrameKeys, TierUsage, Transfer
from hotspan.tiers.commit import GroupCommit
from hotspan.tiers.io import IoQueue, IoThreads
from hotspan.tiers.record import Record
from hotspan.tiers.sealed import open_frame, seal_frame

logger = logging.getLogger(__name__)

_GONE = (FrameFault.EXPIRED, FrameFault.SHREDDED)
_REFUSED = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EBUSY)
"""A store that is full, or says no for another reason, is well."""

_MAX_KNOWN = 1 << 16
_MAX_MARKS = 1 << 16
_MARKS_AT_ONCE = 256
"""Keys in one call of the store, which has its deadline: an object store writes one object for a chain's marks."""

_ABSENT_S = 10.0
_USAGE_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """How to use a store.

    store:       closed with the tier.
    follower:    of the store's log; it outlives the tier.
    threads:     that move frames. store_depth: stores in flight.
    keys:        None writes plain frames.
    queue:       makes the I/O threads, or stands in for them.
    """

    store: ObjectStore
    follower: LogFollower
    threads: int = 4
    store_depth: int = 16
    keys: FrameKeys | None = None
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
        self._follower = options.follower
        self._store_depth = options.store_depth
        self._keys = options.keys
        self._marks = options.follower.marks
        self._clock = clock or SystemClock()
        self._known = KnownChunks(options.follower, _MAX_KNOWN)
        self._absent: OrderedDict[ChunkKey, float] = OrderedDict()  # until when
        self._gaps: set[ChunkKey] = set()  # of those, where a chain breaks off: there may be more of it behind
        self._asking: set[ChunkKey] = set()
        self._storing: dict[ChunkKey, bool] = {}  # whether it is still wanted
        self._is_marking = self._is_measuring = False
        self._usage = StoreUsage()
        self._usage_s = -_USAGE_EVERY_S
        self._done: deque[Callable[[], Transfer | None]] = deque()
        self._landed = threading.Event()
        scratch = HEADER_BYTES + (payload_bytes + PAGE_BYTES if self._keys is not None else 0)
        self._queue = options.queue("l2", options.threads, scratch)
        self._log_queue = options.queue("l2-log", 1, HEADER_BYTES)
        self._commits = GroupCommit(self._log_queue, lambda number, scopes: self._follower.append(scopes))
        self._closed = False

    # -- what is there ---------------------------------------------------------------------------------------------

    @property
    def asking(self) -> int:
        return len(self._asking)

    def ask(self, chunks: Sequence[Chunk], tenant: int) -> None:
        unknown = {chunk.key for chunk in chunks if not self._is_settled(chunk.key)}
        if not unknown or not self._follower.is_fresh:
            return
        unknown -= self._asking
        if unknown:
            self._asking |= unknown
            asked, since = tuple(chunks), self._known.now()
            nothing = partial(self._answered, asked, tenant, unknown, since, None)
            self._queue.submit(
                lambda scratch: self._find(asked, tenant, unknown, since), lambda: self._report(nothing), urgent=True
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
        return found.terms

    # -- transfers -------------------------------------------------------------------------------------------------

    def can_store(self) -> bool:
        return len(self._storing) < self._store_depth and self._follower.is_fresh

    def holds_back(self, key: ChunkKey, terms: Terms) -> bool:
        return self._commits.hold_back(key, self._namespace, terms)

    def released(self) -> list[ChunkKey]:
        return self._commits.released()

    def submit_store(self, chunk: Chunk, terms: Terms, payload: memoryview) -> bool:
        self._check_size(payload)
        if chunk.key in self._storing or self.lookup(chunk.key) or not self.can_store():
            return False
        if self._commits.takes(chunk.key, self._namespace, terms):
            return False  # the log's readers would count it as of before
        terms = terms.at(self._follower.applied)
        stamp = secrets.randbits(64)
        record = Record(chunk.key, chunk.parent, self._namespace, self._payload_bytes, terms, stamp, chunk.index)
        self._storing[chunk.key] = True
        dropped = partial(self._stored, record, None, Fault.DROPPED, 0.0)
        self._queue.submit(
            lambda scratch: self._put(record, scratch, payload), lambda: self._report(dropped), urgent=False
        )
        return True

    def submit_load(self, key: ChunkKey, into: memoryview) -> bool:
        self._check_size(into)
        if not self.lookup(key):
            return False
        found = self._known.get(key)
        if found is None:
            return False
        dropped = partial(self._loaded, found.record, Fault.DROPPED, 0.0)
        self._queue.submit(lambda scratch: self._get(found, scratch, into), lambda: self._report(dropped), urgent=True)
        return True

    def finished(self) -> list[Transfer]:
        self._landed.clear()
        transfers: list[Transfer] = []
        while self._done:
            transfer = self._done.popleft()()
            if transfer is not None:
                transfers.append(transfer)
        self._submit_marks()
        now = self._clock.monotonic()
        if now - self._usage_s >= _USAGE_EVERY_S and not self._is_measuring:
            self._usage_s, self._is_measuring = now, True  # it may take minutes where there is much
            self._queue.submit(lambda scratch: self._measure(), lambda: self._report(self._measured), urgent=False)
        return transfers

    def wait(self, timeout_s: float) -> bool:
        return self._landed.wait(timeout_s)

    def touch(self, keys: Iterable[ChunkKey]) -> None:
        return  # the store sees for itself what is read

    # -- terms -----------------------------------------------------------------------------------------------------

    def join(self, key: ChunkKey, terms: Terms) -> None:
        found = self._known.get(key)
        if found is not None:
            joined = found.terms.joined(terms)
            if joined is found.terms:
                return
            self._known.change(replace(found, terms=joined.at(self._follower.applied)))
        elif key not in self._storing and key not in self._gaps and self._is_absent(key):
            return  # who stores it next says so with the record; what lies behind a gap goes with the gap's chunk
        if terms.labels or terms.expires_s or terms.is_wild:
            self._mark(key, terms)

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

    def usage(self) -> TierUsage:
        slot = HEADER_BYTES + self._payload_bytes
        usage = self._usage
        return TierUsage(usage.objects, usage.capacity_bytes // slot, usage.bytes, usage.capacity_bytes, {})

    def give_up(self) -> None:
        self._queue.drop()
        self._commits.give_up()

    def close(self, timeout_s: float) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = Deadline(timeout_s)
        self._submit_marks(at_most=None)
        for queue in (self._queue, self._log_queue):
            queue.close(deadline.rest_s())
        self._store.close()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree (for tests; call with no transfer unreported)."""
        if not self._queue.drain(5.0) or self.finished() or self._storing or self._asking:
            raise AssertionError("a transfer or an answer is in flight")
        self._known.check()

    # -- the scheduler's thread ------------------------------------------------------------------------------------

    def _is_settled(self, key: ChunkKey) -> bool:
        return self.lookup(key) or self._is_absent(key)

    def _is_absent(self, key: ChunkKey) -> bool:
        return self._absent.get(key, 0.0) > self._clock.monotonic()

    def _answered(
        self,
        chunks: Sequence[Chunk],
        tenant: int,
        unknown: set[ChunkKey],
        since: Moment,
        found: Mapping[ChunkKey, Found] | None,
    ) -> None:
        self._asking -= unknown
        if found is None or not self._holds(since, tenant):
            return  # nothing, or what may have been invalidated since
        now_s = self._clock.unix()
        alive, dead = readable(chunks, found, self._follower.view, self._namespace, self._payload_bytes, now_s)
        for one in alive:
            self._know(one, since)
        if dead:
            self._delete(dead, tenant)
        until_s = self._clock.monotonic() + _ABSENT_S
        absent = {key for key in unknown if self._known.get(key) is None}
        for key in absent:
            self._absent[key] = until_s
            self._absent.move_to_end(key)
        parents = {chunk.parent for chunk in chunks}
        self._gaps |= {c.key for c in chunks if c.key in absent and c.key in parents and c.parent not in absent}
        while len(self._absent) > _MAX_KNOWN:
            self._gaps.discard(self._absent.popitem(last=False)[0])

    def _holds(self, since: Moment, tenant: int) -> bool:
        """Whether nothing of a tenant was invalidated since then, nor is about to be."""
        return self._known.holds(since, tenant) and not self._commits.concerns(tenant)

    def _know(self, found: Found, since: Moment) -> None:
        key = found.record.key
        if key in self._marks:
            found = replace(found, terms=found.terms.joined(self._marks[key]))
        self._known.put(found, since)
        self._absent.pop(key, None)
        self._gaps.discard(key)

    def _stored(self, record: Record, found: Found | None, fault: Fault | None, seconds: float) -> Transfer:
        """A store ended. found: what is there now, if it may be known without asking."""
        is_wanted = self._storing.pop(record.key)
        since = self._known.now()._replace(generation=record.terms.generation)
        if fault is None and not is_wanted:
            self._delete([record.key], record.terms.tenant)
        elif found is not None and self._holds(since, record.terms.tenant):
            self._know(found, since)
        return Transfer(record.key, False, fault, self._payload_bytes if fault is None else 0, seconds)

    def _loaded(self, record: Record, fault: Fault | None, seconds: float) -> Transfer:
        key = record.key
        if fault is not None and fault is not Fault.DROPPED:
            self._known.pop(key)
        if fault is Fault.CORRUPT:
            self._delete([key], record.terms.tenant)
        return Transfer(key, True, fault, self._payload_bytes if fault is None else 0, seconds)

    def _mark(self, key: ChunkKey, terms: Terms) -> None:
        if len(self._marks) < _MAX_MARKS or key in self._marks:
            terms = terms.at(self._follower.applied)
            self._marks[key] = self._marks[key].joined(terms) if key in self._marks else terms
        else:  # who hit what is too much to remember: nothing may stay of the tenant that has most of it
            ((tenant, _),) = Counter(each.tenant for each in [*self._marks.values(), terms]).most_common(1)
            for name in [name for name, each in self._marks.items() if each.tenant == tenant]:
                del self._marks[name]
            self.invalidate([Scope(tenant=tenant)], lambda done: None)
            if terms.tenant != tenant:
                self._mark(key, terms)

    def _submit_marks(self, at_most: int | None = _MARKS_AT_ONCE) -> None:
        if self._marks and not self._is_marking:
            self._is_marking = True
            marks = dict(islice(self._marks.items(), at_most))
            # An object that is not known here may have been invalidated: a hit of another copy does not undo that.
            packed = {
                key: marks_of(each, each.generation if self._known.get(key) else 0) for key, each in marks.items()
            }
            self._queue.submit(
                lambda scratch: self._write_marks(marks, packed),
                lambda: self._report(partial(self._marked, {})),
                urgent=False,
            )

    def _marked(self, written: Mapping[ChunkKey, Terms]) -> None:
        self._is_marking = False
        for key, terms in written.items():
            if self._marks.get(key) is terms:
                del self._marks[key]

    def _measured(self) -> None:
        self._is_measuring = False

    def _delete(self, keys: Sequence[ChunkKey], tenant: int) -> None:
        self._queue.submit(lambda scratch: self._delete_now(keys, tenant), lambda: None, urgent=False)

    def _check_size(self, buffer: memoryview) -> None:
        if len(buffer) != self._payload_bytes:
            raise ValueError(f"the buffer has {len(buffer)} bytes, not {self._payload_bytes}")

    # -- the I/O threads: touch only what they were given -----------------------------------------------------------
    # An error goes to the log as text: the exception holds on to the buffers of its transfer, and a handler to it.

    def _find(self, chunks: Sequence[Chunk], tenant: int, unknown: set[ChunkKey], since: Moment) -> None:
        found: dict[ChunkKey, Found] = {}
        has_answered = True
        try:
            for group in _groups(chunks):
                keys = [chunk.key for chunk in group]
                is_chain = len(group) == 1 or group[1].parent is not None
                some = self._store.find(keys, tenant, is_chain=is_chain)
                found |= {one.record.key: one for one in some if one is not None}
        except OSError as error:
            has_answered = False
            logger.warning("l2_find_failed chunks=%d error=%s", len(chunks), str(error))
        self._report(partial(self._answered, chunks, tenant, unknown, since, found if has_answered else None))

    def _put(self, record: Record, scratch: memoryview, payload: memoryview) -> None:
        started = self._clock.monotonic()
        fault: Fault | None = None
        identity = FrameIdentity(
            record.key, self._namespace, record.stamp, record.terms.generation, record.terms.expires_s
        )
        header, found = scratch[:HEADER_BYTES], None
        try:
            if self._is_there(record):
                self._join_there(record)
            elif self._keys is None:
                seal(header, payload, identity)
                found = self._put_new(record, [header, payload])
            elif (sealing := self._keys.sealing(record.terms.tenant)) is None:
                fault = Fault.GONE
            else:
                found = self._put_new(record, [header, seal_frame(scratch, payload, identity, sealing)])
        except OSError as error:
            fault = Fault.DROPPED if error.errno in _REFUSED else Fault.IO
            logger.warning("l2_store_failed error=%s", str(error))
        self._report(partial(self._stored, record, found, fault, self._clock.monotonic() - started))

    def _is_there(self, record: Record) -> bool:
        """Whether an object of that chunk is there, and may be read; one that may not is deleted."""
        (found,) = self._store.find([record.key], record.terms.tenant, is_chain=False)
        if found is None:
            return False
        matched_at = self._follower.view.matched_at(record.key, self._namespace, found.terms)
        if found.terms.generation >= matched_at and is_of(found, record):
            return True
        self._store.delete([record.key], record.terms.tenant)
        return False

    def _put_new(self, record: Record, frame: Sequence[memoryview]) -> Found | None:
        """What is there now; None if somebody else was first, whose object is to be asked for."""
        if self._store.put(record, frame):
            return Found(record, record.terms)
        self._join_there(record)
        return None

    def _join_there(self, record: Record) -> None:
        """Somebody else stored the chunk: theirs stays, on the terms of both.

        Marked as of the beginning: nobody has looked at whether theirs outlived what was invalidated since.
        """
        self._store.mark({record.key: marks_of(record.terms, 0)})

    def _get(self, found: Found, scratch: memoryview, into: memoryview) -> None:
        started = self._clock.monotonic()
        record = found.record
        identity = FrameIdentity(record.key, self._namespace, record.stamp)
        header, now_s = scratch[:HEADER_BYTES], self._clock.unix()
        fault: Fault | None = None
        wrong: FrameFault | None = None
        try:
            staging = into if self._keys is None else scratch[HEADER_BYTES : HEADER_BYTES + len(into)]
            checked = _Checked(header, into)
            if not self._store.get(found, [header, staging], checked.landed if self._keys is None else None):
                fault = Fault.GONE
            elif self._keys is None:
                wrong = checked.fault(identity, now_s)
            else:
                wrong = open_frame(scratch, into, identity, now_s, self._keys.opening)
        except OSError as error:
            fault = Fault.IO
            logger.warning("l2_load_failed error=%s", str(error))
        if wrong is not None:
            fault = Fault.GONE if wrong in _GONE else Fault.CORRUPT
            logger.warning("l2_frame_refused fault=%s", wrong.value)
        self._report(partial(self._loaded, record, fault, self._clock.monotonic() - started))

    def _write_marks(self, marks: Mapping[ChunkKey, Terms], packed: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        written = marks
        try:
            self._store.mark(packed)
        except OSError as error:
            written = {}
            logger.warning("l2_marks_not_written keys=%d error=%s", len(marks), str(error))
        self._report(partial(self._marked, written))

    def _delete_now(self, keys: Sequence[ChunkKey], tenant: int) -> None:
        try:
            self._store.delete(keys, tenant)
        except OSError as error:
            logger.warning("l2_delete_failed keys=%d error=%s", len(keys), str(error))  # a miss in any case

    def _measure(self) -> None:
        try:
            self._usage = self._store.usage()
        except OSError as error:
            logger.warning("l2_usage_failed error=%s", str(error))
        self._report(self._measured)

    def _report(self, done: Callable[[], Transfer | None]) -> None:
        self._done.append(done)
        self._landed.set()


class _Checked:
    """A plain frame that is verified segment by segment as it lands, while its bytes are in the CPU's caches."""

    def __init__(self, header: memoryview, payload: memoryview) -> None:
        self._header = header
        self._payload = payload
        self._faults: dict[int, FrameFault | None] = {}

    def landed(self, first: int, part: memoryview) -> None:
        """A segment is there, behind the header; anew, if it had been."""
        self._faults[first] = verify_part(self._header, len(self._payload), first, part)

    def fault(self, identity: FrameIdentity, now_s: float) -> FrameFault | None:
        """None if all of it is the frame of `identity`, else why not."""
        expected = {first for _, first, _ in segments(len(self._payload))}
        if self._faults.keys() != expected:
            return verify(self._header, self._payload, identity, now_s)
        fault = verify_header(self._header, len(self._payload), identity, now_s)
        return fault or next((each for each in self._faults.values() if each is not None), None)


def _groups(chunks: Sequence[Chunk]) -> Iterator[Sequence[Chunk]]:
    """The chunks of each KV cache group; each begins with the chunk at place 0."""
    first = 0
    for at in range(1, len(chunks) + 1):
        if at == len(chunks) or chunks[at].index == 0:
            yield chunks[first:at]
            first = at
