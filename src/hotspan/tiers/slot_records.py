"""The records of a slab's slots in memory: which chunk is in each, and on what terms. It asks nothing of a file.

record 0 | record 1 | ... | record slots-1      RECORD_BYTES each (tiers/record.py)
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from hotspan.core.terms import WINDOW, Scope
from hotspan.core.types import ChunkKey
from hotspan.tiers.log import Invalidation
from hotspan.tiers.record import (
    ASIDE,
    CHECK_AT,
    HAS_PARENT,
    IS_WILD,
    LIVE,
    PART_BITS_AT,
    RECORD_BYTES,
    RECORD_LABELS,
    SIZE_BITS,
    Flaw,
    Record,
    pack_aside,
    pack_parts,
    unpack,
)

_Slots = np.ndarray[Any, Any]
_FEW_LABELS = 4

_DTYPE = np.dtype(
    {
        "names": [
            "magic",
            "flags",
            "key",
            "parent",
            "namespace",
            "payload_bytes",
            "generation",
            "expires_s",
            "tenant",
            "adapter",
            "stamp",
            "labels",
            "check",
        ],
        "formats": ["<u4", "<u2", "V32", "V32", "V32", *["<u8"] * 6, f"({RECORD_LABELS},)<u8", ">u8"],
        "offsets": [0, 4, 8, 40, 72, 104, 112, 120, 128, 136, 144, 152, CHECK_AT],
        "itemsize": RECORD_BYTES,
    }
)


class SlotRecords:
    """What is in each slot, and who is taken by an invalidation. One thread calls what changes it."""

    def __init__(self, slots: int) -> None:
        self._memory = bytearray(RECORD_BYTES * slots)
        self._records: np.ndarray[Any, Any] = np.frombuffer(self._memory, _DTYPE)
        self._is_head = bytearray(slots)  # whether a slot holds the first part of a chunk
        self._heads: np.ndarray[Any, Any] = np.frombuffer(self._is_head, bool)
        self._windows: set[int] = set()  # the first slots of windows
        self._soonest_s = 0.0  # before that nothing expires

    def slots(self) -> list[int]:
        """The slots that hold a chunk, in order."""
        found: list[int] = np.flatnonzero(self._records["magic"] == LIVE).tolist()
        return found

    def empty(self) -> list[int]:
        """The slots that hold nothing and may be used, in order."""
        found: list[int] = np.flatnonzero(~np.isin(self._records["magic"], (LIVE, ASIDE))).tolist()
        return found

    def aside(self) -> dict[int, Flaw]:
        """The slots that are set aside."""
        slots = np.flatnonzero(self._records["magic"] == ASIDE).tolist()
        known = {flaw.value for flaw in Flaw}
        flaws = (flags if flags in known else Flaw.READ for flags in self._records["flags"][slots].tolist())
        return dict(zip(slots, map(Flaw, flaws), strict=True))

    def set_aside(self, flaws: Mapping[int, Flaw]) -> None:
        """Say in memory that these slots hold nothing and are not to be used."""
        self.free(flaws)
        for slot, flaw in flaws.items():
            self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = pack_aside(flaw)

    def heads(self) -> list[int]:
        """The first slots of all chunks, in order."""
        found: list[int] = np.flatnonzero(self._heads).tolist()
        return found

    def summaries(self) -> Iterator[tuple[int, int, ChunkKey, ChunkKey | None, bytes, int, int, int, int]]:
        """(slot, part, key, parent, namespace, tenant, expires_s, payload bytes, stamp); half a microsecond each."""
        slots = self.slots()
        names = ("flags", "key", "parent", "namespace", "tenant", "expires_s", "payload_bytes", "stamp")
        columns = (self._records[name][slots].tolist() for name in names)
        for slot, flags, key, parent, namespace, tenant, expires_s, size, stamp in zip(slots, *columns, strict=True):
            above = ChunkKey(parent) if flags & HAS_PARENT else None
            size &= (1 << SIZE_BITS) - 1
            yield slot, flags >> PART_BITS_AT, ChunkKey(key), above, namespace, tenant, expires_s, size, stamp

    def record(self, slot: int) -> Record:
        """What stands in `slot`. Raises: KeyError if nothing does."""
        found = unpack(bytes(self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]))
        if found is None:
            raise KeyError(f"slot {slot} holds no chunk")
        return found

    def put(self, slot: int, record: Record) -> None:
        """Say in memory what stands in `slot`."""
        self.put_parts([slot], record)

    def put_parts(self, slots: Sequence[int], record: Record) -> None:
        """Say in memory that a chunk stands in these slots, one part of it in each, from that of `record` on."""
        data = pack_parts(record, len(slots))
        for nth, slot in enumerate(slots):
            at = slot * RECORD_BYTES
            self._memory[at : at + RECORD_BYTES] = data[nth * RECORD_BYTES : (nth + 1) * RECORD_BYTES]
            self._is_head[slot] = record.part + nth == 0
        self._change(slots)
        if record.terms.is_window and not record.part:
            self._windows.add(slots[0])
        if record.terms.expires_s:
            self._soonest_s = min(self._soonest_s, record.terms.expires_s)

    def free(self, slots: Iterable[int]) -> None:
        """Say in memory that nothing stands in these slots."""
        for slot in slots:
            self._memory[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = bytes(RECORD_BYTES)
            self._is_head[slot] = False
        self._change(slots)

    def _change(self, slots: Iterable[int]) -> None:
        """These slots hold something else now."""
        self._windows.difference_update(slots)

    def taken(
        self,
        scopes: Iterable[Scope],
        before: int | None = None,
        slot_of: Callable[[ChunkKey], int | None] | None = None,
    ) -> list[int]:
        """First slots of chunks that an invalidation takes, without descendants; below generation `before`, if given.

        slot_of: finds a key's slot, so that keys cost nothing but themselves and the windows that there are.

        Costs about 5 ns a slot, and 20 ns for each slot of a tenant and each of its scopes; above a few scopes by label
        100 ns for each slot of the tenant, and for each scope what it finds.
        """
        live = self._heads.copy()
        if before is not None:
            live[live] = self._records["generation"][live] < before
        of: dict[int | None, _Slots] = {None: np.flatnonzero(live)}
        scopes, found = list(dict.fromkeys(scopes)), set[int]()
        labels: dict[int | None, set[int]] = {}  # one of each scope's that names labels, by tenant
        for scope in scopes:
            if scope.labels and scope.keys is None:
                labels.setdefault(scope.tenant, set()).add(min(scope.labels))
        labelled: dict[int | None, dict[int, _Slots]] = {}
        for scope in scopes:
            if scope.keys is not None and slot_of is not None:
                named = [slot for key in scope.keys if (slot := slot_of(key)) is not None]
                slots = np.array([*{*named, *self._windows}], np.intp)
                slots = slots[live[slots]]
            else:
                if scope.tenant not in of:
                    of[scope.tenant] = of[None][self._records["tenant"][of[None]] == scope.tenant]
                slots = of[scope.tenant]
                if scope.labels and scope.keys is None and len(labels[scope.tenant]) > _FEW_LABELS:
                    if scope.tenant not in labelled:
                        labelled[scope.tenant] = self._by_label(slots, labels[scope.tenant])
                    slots = labelled[scope.tenant][min(scope.labels)]
            found.update(self._narrowed(slots, scope))
        return sorted(found)

    def _by_label(self, slots: _Slots, labels: set[int]) -> dict[int, _Slots]:
        """For each label those of some slots whose chunks have it, or may have it."""
        records = self._records
        wild = slots[(records["flags"][slots] & IS_WILD) != 0]
        rows, columns = np.nonzero(records["labels"][slots])
        named = records["labels"][slots[rows], columns]
        is_wanted = np.isin(named, np.array(sorted(labels), np.uint64))
        rows, named = rows[is_wanted], named[is_wanted]
        in_order = np.argsort(named, kind="stable")
        rows, named = rows[in_order], named[in_order]
        found = {}
        for label in labels:
            first, last = (np.searchsorted(named, np.uint64(label), side) for side in ("left", "right"))
            found[label] = np.concatenate((slots[rows[first:last]], wild))
        return found

    def are_of(self, namespace: bytes, slots: Sequence[int]) -> list[bool]:
        """For each slot whether its chunk is of a namespace."""
        found: list[bool] = (self._records["namespace"][np.asarray(slots, np.int64)] == np.void(namespace)).tolist()
        return found

    def _narrowed(self, slots: _Slots, scope: Scope) -> list[int]:
        """Those of some slots whose chunks a scope takes."""
        records = self._records
        for name in ("tenant", "adapter"):
            if (wanted := getattr(scope, name)) is not None:
                slots = slots[records[name][slots] == wanted]
        if scope.namespace is not None:
            slots = slots[records["namespace"][slots] == np.void(scope.namespace)]
        for label in scope.labels:
            is_wild = (records["flags"][slots] & IS_WILD) != 0
            slots = slots[is_wild | (records["labels"][slots] == label).any(axis=1)]
        found: list[int] = slots.tolist()
        if scope.keys is None:
            return found
        return [slot for slot in found if slot in self._windows or self.key(slot) in scope.keys]

    def deleted(self, entries: Iterable[Invalidation]) -> list[int]:
        """First slots of chunks that invalidations of the past took, descendants included."""
        children: dict[bytes, list[int]] = {}
        found: set[int] = set()
        for entry in entries:
            slots = self.taken(entry.scopes, entry.generation)
            todo = {self.key(slot) for slot in slots}.union(*(scope.keys or () for scope in entry.scopes))
            found.update(slots)
            if todo and not children:
                children = self._children()
            while todo:
                named = [child for child in children.get(todo.pop(), ()) if child not in found]
                fresh = [child for child in named if self._records["generation"][child] < entry.generation]
                found.update(fresh)
                todo.update(map(self.key, fresh))
        return sorted(found)

    def _children(self) -> dict[bytes, list[int]]:
        """The slots of what stands on each chunk."""
        names = np.frombuffer(self._memory, np.uint8).reshape(-1, RECORD_BYTES)
        children: dict[bytes, list[int]] = {}
        heads = np.flatnonzero(self._heads)
        for slot in heads[self._records["flags"][heads] & HAS_PARENT != 0]:
            children.setdefault(names[slot, 40:72].tobytes(), []).append(int(slot))
        return children

    def newest_generation(self) -> int:
        """The highest generation that a record says."""
        live = self._records[self._records["magic"] == LIVE]
        return int(live["generation"].max()) if len(live) else 0

    def expired(self, now_s: float) -> list[int]:
        """First slots of chunks whose time is over. Costs nothing while that of none is, else about 40 ns a chunk."""
        if now_s < self._soonest_s:
            return []
        heads = np.flatnonzero(self._heads)
        timed = heads[self._records["expires_s"][heads] != 0]
        ends = self._records["expires_s"][timed]
        self._soonest_s = float(ends.min()) if len(ends) else math.inf
        slots: list[int] = timed[ends <= int(now_s)].tolist()
        return slots

    def key(self, slot: int) -> ChunkKey:
        """The key in the record of `slot`."""
        return ChunkKey(bytes(self._memory[slot * RECORD_BYTES + 8 : slot * RECORD_BYTES + 40]))

    def _look(self) -> None:
        """Take over what `_memory` has: a torn or foreign record is a free slot. About 0.3 us a live record."""
        self._soonest_s = 0.0
        view, digest = memoryview(self._memory), xxhash.xxh3_64_intdigest
        slots = np.flatnonzero(np.isin(self._records["magic"], (LIVE, ASIDE))).tolist()
        for slot, check in zip(slots, self._records["check"][slots].tolist(), strict=True):
            at = slot * RECORD_BYTES
            if digest(view[at : at + CHECK_AT]) != check:
                self._records["magic"][slot] = 0
        self._heads[:] = (self._records["magic"] == LIVE) & (self._records["flags"] >> PART_BITS_AT == 0)
        is_window = (self._records["labels"] == WINDOW).any(axis=1)
        self._windows = set(np.flatnonzero(self._heads & is_window).tolist())
