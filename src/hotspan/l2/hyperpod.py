"""HyperPod's managed tiered storage as an L2: `sagemaker-hyperpod://host:9200`, one daemon on each node.

Its protocol knows put, lease and release. An object is one run of bytes, as stores/base.py draws it; marks are objects
of their own (stores/mark_chains.py). There is no log, and no delete unless the daemon is hotspan's own.
"""

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.deadline import Deadline
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import ChunkKey
from hotspan.l2.base import PREAMBLE_BYTES, Found, Landed, SharedLog, StoreUsage
from hotspan.l2.leases import HyperpodDaemon, Lease
from hotspan.l2.mark_chains import MarkChains, name_of
from hotspan.l2.options import HyperpodOptions
from hotspan.tiers.record import RECORD_BYTES, Record, pack, unpack

logger = logging.getLogger(__name__)

_FIRST_BATCH = 8


@dataclass(frozen=True, slots=True)
class _Held:
    """A lease that `find` got, for the `get` that follows."""

    lease: Lease
    record: Record


class HyperpodStore:
    """An ObjectStore on a daemon that speaks HyperPod's protocol. Every method takes `timeout_s` at most."""

    log: SharedLog | None = None

    def __init__(self, host: str, port: int, options: HyperpodOptions, clock: Clock | None = None) -> None:
        self._daemon = HyperpodDaemon(host, port, options, clock or SystemClock())
        self._chains = MarkChains(self._daemon)
        self._options = options
        self._held: dict[ChunkKey, _Held] = {}
        self._holding = threading.Lock()
        self._said_no_delete = False

    @property
    def refused(self) -> Mapping[str, int]:
        """Leases that were not believed or not granted, by reason."""
        return self._daemon.refused

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        """As ObjectStore says, in batches that grow; what was found stays leased until `get`, or for `lease_ttl_s`."""
        deadline = Deadline(self._options.timeout_s)
        with self._holding:
            self._held = {key: held for key, held in self._held.items() if not self._daemon.is_over(held.lease)}
        answers: list[Found | None] = []
        for batch in _batches(keys, self._options.connections) if is_chain else ([key] for key in keys):
            found = self._find(batch, deadline)
            answers += [*found, *[None] * (len(batch) - len(found))]
            if is_chain and len(found) < len(batch):
                break
        return answers + [None] * (len(keys) - len(answers))

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        """As ObjectStore says, from the lease that `find` left if that is still good, else from a new one."""
        record = found.record
        if sum(map(len, into)) != HEADER_BYTES + record.payload_bytes:
            return False
        lease = self._leased(record.key, Deadline(self._options.timeout_s))
        if lease is None:
            return False
        try:
            # The record was right when it was found; a daemon that forgets leases may have reused the bytes since.
            return self._record(record.key, lease) == record and self._daemon.read(lease, PREAMBLE_BYTES, into)
        finally:
            self._daemon.release_all([lease])

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        preamble = pack(record).ljust(PREAMBLE_BYTES, b"\0")
        return self._daemon.put(name_of(record.key), [preamble, *frame])

    def mark(self, marks: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        """As ObjectStore says. Raises: OSError also where a chunk has no room for an earlier expiry."""
        self._chains.add(marks, Deadline(self._options.timeout_s))

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        """As ObjectStore says, of hotspan's own daemon. HyperPod's can't: its objects stay until it evicts them."""
        deadline = Deadline(self._options.timeout_s)
        self._let_go(keys)
        if not self._daemon.can_delete(deadline):
            if not self._said_no_delete:
                logger.warning("l2_can_not_delete reason=protocol objects=%d", len(keys))
            self._said_no_delete = True
            return
        self._daemon.delete_all([name_of(key) for key in keys], deadline)
        self._chains.delete(keys, deadline)

    def usage(self) -> StoreUsage:
        """Nothing unless the daemon is hotspan's: the protocol does not say."""
        said = self._daemon.health(Deadline(self._options.timeout_s))
        sizes = (said.get(name) for name in ("objects", "bytes", "capacity_bytes"))
        return StoreUsage(*(size if type(size) is int else 0 for size in sizes))

    def close(self) -> None:
        self._let_go(list(self._held))
        self._daemon.close()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _find(self, keys: Sequence[ChunkKey], deadline: Deadline) -> list[Found]:
        """What is there of a batch, up to the first that is not."""
        leases = self._daemon.lease_all([name_of(key) for key in keys], deadline)
        kept: dict[ChunkKey, _Held] = {}
        try:
            for key, lease in zip(keys, leases, strict=True):
                record = None if lease is None else self._record(key, lease)
                if lease is None or record is None:
                    break
                kept[key] = _Held(lease, record)
            chains = self._chains.read(kept, deadline)  # after the objects: a daemon evicts what was asked for first
        except BaseException:
            self._daemon.release_all(leases)
            raise
        found = []
        for key, held in kept.items():
            chain = chains[key]
            if chain is None:
                break
            found.append(Found(held.record, chain.terms(held.record.terms)))
        self._daemon.release_all(leases[len(found) :])
        self._hold({key: kept[key] for key in keys[: len(found)]})
        return found

    def _leased(self, key: ChunkKey, deadline: Deadline) -> Lease | None:
        """The lease that `find` left; where objects can be deleted a new one, for only that says that it is there."""
        can_delete = self._daemon.can_delete(deadline)
        with self._holding:
            held = self._held.pop(key, None)
        if held is not None and not can_delete and not self._daemon.is_over(held.lease):
            return held.lease
        try:
            (lease,) = self._daemon.lease_all([name_of(key)], deadline)
            return lease
        finally:
            self._daemon.release_all([] if held is None else [held.lease])

    def _record(self, key: ChunkKey, lease: Lease) -> Record | None:
        """The record that stands before a frame; None unless the object is that of `key`, and of the size it says."""
        if lease.size < PREAMBLE_BYTES + HEADER_BYTES:
            return None
        data = bytearray(RECORD_BYTES)
        if not self._daemon.read(lease, 0, [memoryview(data)]):
            return None
        record = unpack(bytes(data))
        if record is None or record.key != key:
            return None
        return record if lease.size == PREAMBLE_BYTES + HEADER_BYTES + record.payload_bytes else None

    def _hold(self, fresh: Mapping[ChunkKey, _Held]) -> None:
        with self._holding:
            former = [self._held.pop(key, None) for key in fresh]
            self._held.update(fresh)
        self._daemon.release_all(held.lease for held in former if held is not None)

    def _let_go(self, keys: Sequence[ChunkKey]) -> None:
        with self._holding:
            dropped = [self._held.pop(key, None) for key in keys]
        self._daemon.release_all(held.lease for held in dropped if held is not None)


def _batches(keys: Sequence[ChunkKey], most: int) -> Iterator[Sequence[ChunkKey]]:
    """Keys in batches that double, so that a chain that is not there costs little."""
    at, size = 0, min(_FIRST_BATCH, most)
    while at < len(keys):
        yield keys[at : at + size]
        at, size = at + size, min(2 * size, most)
