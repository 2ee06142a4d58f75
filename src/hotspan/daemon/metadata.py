"""Metadata of chunks that are not here: the updates that hits add, kept until the chunk is stored.

    an update, of a chunk that is here or not -> its slot: from when and until when such updates expire  durable with it
    a chunk that is not here                  -> its updates, of the newest 65,536 such chunks           in memory only

Chunks share slots. A chunk whose updates are not in memory any more gets what covers all that its slot stands for: any
tag takes it, and it expires with the first of them; while some have expired and others not, it is a miss.
"""

import base64
from collections import OrderedDict, deque
from collections.abc import Iterable

import numpy as np

from hotspan.core.clock import Clock
from hotspan.core.terms import Terms
from hotspan.core.types import ChunkKey
from hotspan.daemon.stored import StoredObject, joined_updates
from hotspan.l2.base import updated, updates_of

MAX_CHUNKS = 1 << 16
SLOTS = 1 << 22
"""Of 8 bytes. One chunk in 60 shares its slot if 65,536 chunks ever got updates, one in 5 if a million did."""

_SLOT = np.dtype([("first", "<u4"), ("last", "<u4")])
_CHANGE = np.dtype([("slot", "<u4"), *_SLOT.descr])
_NEVER = 0xFFFFFFFF
"""The first expiry, in Unix seconds, where no update has one; the last one is 1 then, and 0 without updates."""


class AbsentMetadata:
    """What the daemon knows of hits of chunks that it does not have.

    is_kept: whether `changes` is called, to have the slots outlive the daemon.
    """

    def __init__(self, clock: Clock, *, is_kept: bool, max_chunks: int = MAX_CHUNKS) -> None:
        self._clock = clock
        self._is_kept = is_kept
        self._max_chunks = max_chunks
        self._updates: OrderedDict[ChunkKey, set[bytes]] = OrderedDict()
        self._slots = np.zeros(SLOTS, _SLOT)
        self._used = 0  # slots
        self._changed: deque[int] = deque()  # slots, for the thread that writes the log

    def note(self, key: ChunkKey, updates: Iterable[bytes]) -> None:
        """Remember that a chunk, be it here or not, got updates."""
        expiries = [at for update in updates if (at := min(updated(Terms(), [update]).expires_s, _NEVER - 1))]
        slot = _slot_of(key)
        first, last = self._slots[slot].item()
        if last <= self._clock.unix():  # the updates of before bind no chunk that is stored from now on by their expiry
            first = _NEVER
        span = (min(first, *expiries, _NEVER), max(last, *expiries, 1))
        if span != self._slots[slot].item():
            self._used += not last
            self._slots[slot] = span
            if self._is_kept:
                self._changed.append(slot)

    def add(self, key: ChunkKey, updates: Iterable[bytes]) -> None:
        """A chunk that is not here got updates."""
        updates, knows = list(updates), self.knows(key)
        self.note(key, updates)
        if knows:  # else the slot covers these, too
            self._keep(key, joined_updates(self._updates.get(key, set()), updates))

    def evicted(self, stored: StoredObject) -> None:
        """A chunk is not here any more."""
        if stored.has_all_updates:
            self._keep(stored.key, stored.updates)

    def deleted(self, key: ChunkKey) -> None:
        """A chunk was deleted, with its updates, of which none was covered by its slot."""
        self._keep(key, set())

    def knows(self, key: ChunkKey) -> bool:
        """Whether all updates of a chunk that is not here are known."""
        return key in self._updates or not self._slots[_slot_of(key)]["last"]

    def take(self, key: ChunkKey) -> set[bytes]:
        """The updates of a chunk that is stored now.

        They are of generation 0: that somebody hit the chunk before does not let this one outlive an invalidation.
        """
        updates = self._updates.pop(key, None)
        if updates is not None:
            return set(updates_of(updated(Terms(), updates), 0))
        first, last = self._slots[_slot_of(key)].item()
        if not last:
            return set()
        is_bound = self._clock.unix() < last
        return set(updates_of(Terms(is_wild=True, expires_s=first if is_bound else 0), 0))

    def clear(self) -> None:
        """No chunk that is stored from now on has updates."""
        self._updates.clear()
        self._changed.clear()
        self._slots = np.zeros(SLOTS, _SLOT)
        self._used = 0

    # -- the slots in the daemon's log, from its thread ----------------------------------------------------------------

    def changes(self) -> str:
        """The slots that changed since the last call, for `load`."""
        changed: set[int] = set()
        while self._changed:
            changed.add(self._changed.popleft())
        return self._packed(np.array(sorted(changed), np.intp))

    @property
    def packed_bytes(self) -> int:
        """Of what `all` returns."""
        return self._used * _CHANGE.itemsize * 4 // 3

    def all(self) -> str:
        """All slots."""
        self._changed.clear()
        return self._packed(np.flatnonzero(self._slots["last"])) if self._used else ""

    def load(self, changes: str) -> None:
        """Take over what an earlier daemon wrote. Raises: ValueError."""
        if not changes:
            return
        table = np.frombuffer(base64.b64decode(changes, validate=True), _CHANGE)
        if table["slot"].max() >= SLOTS:
            raise ValueError("there is no such slot")
        self._used += int(np.count_nonzero(self._slots["last"][table["slot"]] == 0))
        for name in ("first", "last"):
            self._slots[name][table["slot"]] = table[name]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _keep(self, key: ChunkKey, updates: set[bytes]) -> None:
        """Keep updates in memory, if the slot knows of any; those to which nothing was added longest are dropped."""
        self._updates.pop(key, None)
        if self._slots[_slot_of(key)]["last"]:
            self._updates[key] = updates
        while len(self._updates) > self._max_chunks:
            self._updates.popitem(last=False)

    def _packed(self, slots: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> str:
        table = np.empty(len(slots), _CHANGE)
        table["slot"] = slots
        for name in ("first", "last"):
            table[name] = self._slots[name][slots]
        return base64.b64encode(table.tobytes()).decode()


def _slot_of(key: ChunkKey) -> int:
    """Keys are digests, so that any part of one is as good as random."""
    return int.from_bytes(key[:4], "little") % SLOTS
