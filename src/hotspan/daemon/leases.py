"""Who reads what until when: leases, which pin objects for a time."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from hotspan.daemon.stored import StoredObject


@dataclass(frozen=True, slots=True)
class Lease:
    """objects: what it pins. owner: the client with whose end it ends; None if only time or a release ends it."""

    id: int
    objects: Sequence[StoredObject]
    expires_s: float
    owner: object | None


class LeaseBook:
    """All leases. Whoever ends one learns which objects nobody pins any more.

    pinned_bytes: of the segment, that some lease pins.
    """

    def __init__(self) -> None:
        self.pinned_bytes = 0
        self._ids = itertools.count(1)
        self._leases: dict[int, Lease] = {}
        self._by_owner: dict[object, set[int]] = {}
        self._expiries: list[tuple[float, int]] = []  # a heap; entries of leases that ended go stale

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, objects: Sequence[StoredObject], expires_s: float, owner: object | None) -> Lease:
        """Pin these objects."""
        lease = Lease(next(self._ids), objects, expires_s, owner)
        pinned = 0
        for each in objects:
            if not each.pins:
                pinned += each.room
            each.pins += 1
        self.pinned_bytes += pinned
        self._leases[lease.id] = lease
        if owner is not None:
            self._by_owner.setdefault(owner, set()).add(lease.id)
        heappush(self._expiries, (expires_s, lease.id))
        if len(self._expiries) > 2 * len(self._leases) + 64:
            self._expiries = [(each.expires_s, each.id) for each in self._leases.values()]
            heapify(self._expiries)
        return lease

    def end(self, id: int, owner: object | None) -> list[StoredObject]:
        """End the lease if it is this owner's; the objects that nobody pins any more."""
        lease = self._leases.get(id)
        return [] if lease is None or lease.owner is not owner else self._end(lease)

    def end_all(self, owner: object) -> list[StoredObject]:
        """End all leases of an owner."""
        leases = [self._leases[id] for id in self._by_owner.get(owner, ())]
        return [each for lease in leases for each in self._end(lease)]

    def expired(self, now_s: float) -> Lease | None:
        """A lease whose time is over, to be ended; None if there is none left."""
        while self._expiries and self._expiries[0][0] <= now_s:
            lease = self._leases.get(self._expiries[0][1])
            if lease is not None:
                return lease
            heappop(self._expiries)
        return None

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        pins = Counter(each for lease in self._leases.values() for each in lease.objects)
        if any(each.pins != count for each, count in pins.items()):
            raise AssertionError("pins are miscounted")
        if self.pinned_bytes != sum(each.room for each in pins):
            raise AssertionError("pinned bytes are miscounted")
        owned = {(each.owner, each.id) for each in self._leases.values() if each.owner is not None}
        if owned != {(owner, id) for owner, ids in self._by_owner.items() for id in ids}:
            raise AssertionError("owners do not have their leases")
        if not {(each.expires_s, each.id) for each in self._leases.values()} <= set(self._expiries):
            raise AssertionError("a lease would never expire")

    def _end(self, lease: Lease) -> list[StoredObject]:
        del self._leases[lease.id]
        if lease.owner is not None:
            owned = self._by_owner[lease.owner]
            owned.remove(lease.id)
            if not owned:
                del self._by_owner[lease.owner]
        free = []
        for each in lease.objects:
            each.pins -= 1
            if not each.pins:
                self.pinned_bytes -= each.room
                free.append(each)
        return free
