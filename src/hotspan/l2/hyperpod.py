"""HyperPod's managed tiered storage as an L2: `sagemaker-hyperpod://host:9200`, one daemon on each node.

    KEY        an object
    KEY.mN     its metadata after N + 1 additions: [ "HSHM" | N 2 | KEY 32 ][ metadata ][ xxh3-64 8 ]

The protocol knows put, lease and release, and what is there never changes. Who adds to metadata puts it with the next
number; if another was faster (409), it reads what that one wrote and takes the number after it. Each number has all
that the ones before it have, so a reader needs the last one. It finds it in a few steps: 0, 1, 3, 7 ... until one is
missing, then between the last two. Most chunks have none: one step.

There is no log, and no delete unless the daemon is hotspan's own.
"""

import logging
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.terms import MAX_LABELS, Terms
from hotspan.l2.base import StoreUsage, updated, updates_of
from hotspan.l2.blobs import Addition, Part
from hotspan.l2.hyperpod_daemon import HyperpodDaemon, Lease
from hotspan.l2.metadata import ENTRY_BYTES, LIFE_BYTES, NO_LIFE, Metadata, new_life, pack_updates, parse_metadata
from hotspan.l2.objects import BlobStore
from hotspan.l2.options import HyperpodOptions

logger = logging.getLogger(__name__)

MAX_NUMBERS = MAX_LABELS + 1
"""Of metadata; with the last one the chunk is over, whatever it says, so that nothing need ever be added to it."""

_LABELS_UNTIL = 48
"""From this number on metadata says "wild" instead of labels, so that there is room for earlier expiries."""

_HEAD = struct.Struct("<4sH32s")
_MAGIC = b"HSHM"
_CHECK_BYTES = 8
_MAX_BYTES = _HEAD.size + LIFE_BYTES + MAX_LABELS * ENTRY_BYTES + _CHECK_BYTES
(_WILD,) = updates_of(Terms(is_wild=True), 0)
_OVER = frozenset(updates_of(Terms(is_wild=True, expires_s=1), 0))


@dataclass(frozen=True, slots=True)
class _Metadata:
    """What is known of a chunk's metadata.

    last:    its highest number, -1 if there is none. missing: the lowest number known not to be there.
    updates: what the last one has; None if it can't be read: nobody knows what it forbids.
    life:    that of the objects it belongs to; another one once it was emptied.
    """

    last: int = -1
    missing: int = MAX_NUMBERS
    updates: frozenset[bytes] | None = frozenset()
    life: bytes = NO_LIFE

    @property
    def probe(self) -> int | None:
        """Which number to ask for next; None if the last one is known."""
        if self.updates is None or self.missing == self.last + 1:
            return None
        if self.missing == MAX_NUMBERS:
            return min(max(0, 2 * self.last + 1), MAX_NUMBERS - 1)
        return (self.last + self.missing) // 2

    @property
    def can_be_emptied(self) -> bool:
        """Whether the next number can say that there are no updates any more."""
        return bool(self.updates) and self.last + 1 < MAX_NUMBERS

    def data(self) -> bytes | None:
        """As a blob."""
        if self.updates is None:
            return b""
        return self.life + pack_updates(self._all(self.updates)) if self.last >= 0 else None

    def found(self, number: int, said: Metadata | None) -> "_Metadata":
        """After a number that is there; `said` is None if it can't be read."""
        if said is None:
            return _Metadata(number, self.missing, None)
        return _Metadata(number, self.missing, frozenset(said.updates), said.life)

    def successor(self, updates: frozenset[bytes] | None, life: bytes | None = None) -> "_Metadata":
        """What is put under the next number, unless somebody else puts it first."""
        return _Metadata(self.last + 1, self.last + 2, updates, life or self.life)

    def joined(self, updates: Iterable[bytes]) -> frozenset[bytes] | None:
        """What the next number has to say to add updates; None if it is all there. Raises: OSError if that can't be."""
        if self.updates is None:
            raise OSError("a chunk's metadata can't be read, so that nothing can be added to it")
        before = updated(Terms(), self._all(self.updates))
        after = updated(before, updates)
        if after == before:
            return None
        union = self.updates.union(update or _WILD for update in updates)
        if len(union) <= MAX_LABELS and self.last + 1 < _LABELS_UNTIL:
            return union
        return frozenset(updates_of(after.joined(Terms(is_wild=True)), after.generation))

    def _all(self, updates: frozenset[bytes]) -> frozenset[bytes]:
        return updates | _OVER if self.last == MAX_NUMBERS - 1 else updates


class HyperpodBlobs:
    """Blobs on a daemon that speaks HyperPod's protocol."""

    batch = 4

    def __init__(self, daemon: HyperpodDaemon, timeout_s: float) -> None:
        self.daemon = daemon
        self._timeout_s = timeout_s
        self._said_no_delete = False

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        deadline = Deadline(self._timeout_s)
        objects = [part for part in parts if not _is_metadata(part.name)]
        leases = self.daemon.lease_all([_name(part.name) for part in objects], deadline)
        try:
            begun = [self._begin_of(lease, part.limit) for lease, part in zip(leases, objects, strict=True)]
        finally:
            self.daemon.release_all(leases)
        found = {part.name: data for part, data in zip(objects, begun, strict=True)}
        there = {_name(name) for name, data in found.items() if data is not None}
        is_first = bool(parts) and _is_metadata(parts[0].name)
        beside = [part.name for part in parts if _is_metadata(part.name) and (is_first or _name(part.name) in there)]
        # After the objects: a daemon evicts what was asked for first.
        metadata = self._found({_name(name): _Metadata() for name in beside}, deadline)
        for name in beside:
            data = metadata[_name(name)].data()
            found[name] = data if data or _name(name) in there else None  # damaged: nobody will find what is put
        return [found.get(part.name) for part in parts]

    def read_into(self, name: str, into: Sequence[memoryview]) -> bool:
        deadline = Deadline(self._timeout_s)
        (lease,) = self.daemon.lease_all([_name(name)], deadline)
        try:
            if lease is None or lease.size != sum(map(len, into)) or not self.daemon.read(lease, 0, into):
                return False
            touched = {_name(name): _Metadata()}
            self._found(touched, deadline, is_sure=False)  # so that a daemon still evicts the object first
            return True
        finally:
            self.daemon.release_all([lease])

    def create(self, name: str, data: Sequence[memoryview | bytes]) -> bool:
        deadline = Deadline(self._timeout_s)
        if self.daemon.can_delete(deadline):  # who deletes a former object must not empty what hits of this one rely on
            found = self._found({_name(name): _Metadata()}, deadline)
            self._put({key: one.successor(one.updates) for key, one in found.items() if one.can_be_emptied}, deadline)
        return self.daemon.put(_name(name), data)

    def append(self, additions: Sequence[Addition]) -> None:
        """Until a reader finds it: numbers may be there above those that were evicted, and hide what is put below."""
        deadline = Deadline(self._timeout_s)
        added = {_name(one.name): _updates_in(one.first + one.data) for one in additions if one.data}
        found = self._found(dict.fromkeys(added, _Metadata()), deadline)
        while found:
            joined = {name: metadata.joined(added[name]) for name, metadata in found.items()}
            lacking = {name: found[name].successor(updates) for name, updates in joined.items() if updates is not None}
            beaten = self._put(lacking, deadline)
            ahead = {name: replace(found[name], missing=found[name].last + 2) for name in beaten}
            self._found(ahead, deadline, hold=True)
            added |= {name: (*added[name], *(one.updates or ())) for name, one in lacking.items()}
            found = self._found(dict.fromkeys(lacking, _Metadata()), deadline)

    def delete(self, names: Sequence[str]) -> None:
        """On hotspan's own daemon; HyperPod's can't, and its objects stay until it evicts them.

        Metadata is emptied under the next number, unless somebody uses that meanwhile, and begins another life: what
        was put before that is gone with the updates that its hits rely on. If it has all its numbers it stays as it is:
        who hits the chunk once it is put anew relies on it.
        """
        deadline = Deadline(self._timeout_s)
        objects = [_name(name) for name in names if not _is_metadata(name)]
        if not self.daemon.can_delete(deadline):
            if not self._said_no_delete:
                logger.warning("l2_can_not_delete reason=protocol objects=%d", len(objects))
            self._said_no_delete = True
            return
        beside = {_name(name): _Metadata() for name in names if _is_metadata(name)}
        found = self._found(beside, deadline)
        self.daemon.delete_all(objects, deadline)
        emptied = {name: one.successor(frozenset(), new_life()) for name, one in found.items() if one.can_be_emptied}
        self._put(emptied, deadline)
        damaged = [name for name, one in found.items() if one.updates is None]
        self.daemon.delete_all([f"{name}.m{number}" for name in damaged for number in range(MAX_NUMBERS)], deadline)

    def usage(self) -> StoreUsage:
        """Nothing unless the daemon is hotspan's: the protocol does not say."""
        said = self.daemon.health(Deadline(self._timeout_s))
        sizes = (said.get(name) for name in ("objects", "bytes", "capacity_bytes"))
        return StoreUsage(*(size if type(size) is int else 0 for size in sizes))

    def close(self) -> None:
        self.daemon.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _put(self, metadata: Mapping[str, _Metadata], deadline: Deadline) -> list[str]:
        """Put metadata under its number; returns the names where somebody else was faster."""
        values = {
            f"{name}.m{one.last}": [_packed(name, one.last, one.updates or (), one.life)]
            for name, one in metadata.items()
        }
        stored = self.daemon.put_all(values, deadline)
        return [name for name, won in zip(metadata, stored, strict=True) if not won]

    def _found(
        self, metadata: Mapping[str, _Metadata], deadline: Deadline, *, hold: bool = False, is_sure: bool = True
    ) -> dict[str, _Metadata]:
        """The metadata of chunks, asked for until the last number of each is known.

        is_sure: a number that the daemon refuses is an OSError: it is not known to be absent, and may forbid a hit.
        """
        found = dict(metadata)
        while asked := [(name, one, probe) for name, one in found.items() if (probe := one.probe) is not None]:
            names = [f"{name}.m{probe}" for name, _, probe in asked]
            leases = self.daemon.lease_all(names, deadline, hold=hold, is_sure=is_sure)
            try:
                for (name, one, probe), lease in zip(asked, leases, strict=True):
                    if lease is None:
                        found[name] = replace(one, missing=probe)
                    else:
                        data = self._begin_of(lease, _MAX_BYTES) if lease.size <= _MAX_BYTES else None
                        found[name] = one.found(probe, _unpacked(name, probe, data or b""))
            finally:
                self.daemon.release_all(leases)
        return found

    def _begin_of(self, lease: Lease | None, limit: int) -> bytes | None:
        if lease is None:
            return None
        data = bytearray(min(limit, lease.size))
        return bytes(data) if self.daemon.read(lease, 0, [memoryview(data)]) else None


class HyperpodStore(BlobStore):
    """An ObjectStore on a daemon that speaks HyperPod's protocol. Every method takes `timeout_s` at most."""

    blobs: HyperpodBlobs

    def __init__(self, host: str, port: int, options: HyperpodOptions, clock: Clock | None = None) -> None:
        daemon = HyperpodDaemon(host, port, options, clock or SystemClock())
        super().__init__(HyperpodBlobs(daemon, options.timeout_s), None)

    @property
    def refused(self) -> Mapping[str, int]:
        """Leases that were not believed or not granted, by reason."""
        return self.blobs.daemon.refused


def _is_metadata(blob: str) -> bool:
    return blob.startswith("metadata/")


def _name(blob: str) -> str:
    """What the daemon knows an object by."""
    return blob.rpartition("/")[2]


def _updates_in(data: bytes) -> tuple[bytes, ...]:
    metadata = parse_metadata(data)
    return () if metadata is None else metadata.updates


def _packed(name: str, number: int, updates: Iterable[bytes], life: bytes = NO_LIFE) -> bytes:
    body = _HEAD.pack(_MAGIC, number, bytes.fromhex(name)) + life + pack_updates(sorted(updates))
    return body + xxhash.xxh3_64_digest(body)


def _unpacked(name: str, number: int, data: bytes) -> Metadata | None:
    """The metadata in a numbered blob; None if it is not that of that chunk."""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    if xxhash.xxh3_64_digest(body) != check or body[: _HEAD.size] != _HEAD.pack(_MAGIC, number, bytes.fromhex(name)):
        return None
    return parse_metadata(body[_HEAD.size :])
