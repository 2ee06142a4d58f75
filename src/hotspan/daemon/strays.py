"""Marks of objects that are not there: not yet, or not any more."""

from collections import OrderedDict
from collections.abc import Iterable

from hotspan.core.terms import Terms
from hotspan.core.types import MIB, ChunkKey
from hotspan.daemon.journal import NoNotes, Notes
from hotspan.daemon.stored import joined_marks
from hotspan.l2.base import MARK_BYTES, marks_of

MAX_STRAYS = 1 << 16
"""Objects whose marks are kept; the marks of more are remembered as lost."""

_MARKS = b"M"  # followed by a key; marks one after the other, of an object that is there, too
_LOST = b"F"  # followed by the number of a block of the filter
_LOST_BYTES = 4 * MIB
_BLOCK_BYTES = 256
_PROBES = 3
_WILD = marks_of(Terms(is_wild=True), 0)


class StrayMarks:
    """What an object's terms will be joined with when it comes.

    Marks can get lost where too many are kept, and not unnoticed: an object whose marks were lost comes back wild, so
    that any tag takes it. Which objects these are is a Bloom filter: a million lost ones make 1 in 1,000 others wild.

    notes: where all of that is noted, and found.
    """

    def __init__(self, most: int = MAX_STRAYS, notes: Notes | None = None) -> None:
        self._most = most
        self._notes = notes or NoNotes()
        self._marks: OrderedDict[ChunkKey, set[bytes]] = OrderedDict()
        self._lost: bytearray | None = None
        for name, data in self._notes.found.items():
            if name.startswith(_MARKS):
                marks = {data[at : at + MARK_BYTES] for at in range(0, len(data), MARK_BYTES)}
                self._marks[ChunkKey(name[len(_MARKS) :])] = marks
            elif name.startswith(_LOST):
                at = int.from_bytes(name[len(_LOST) :], "little") * _BLOCK_BYTES
                self._lost = self._lost or bytearray(_LOST_BYTES)
                self._lost[at : at + _BLOCK_BYTES] = data

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, key: ChunkKey, marks: Iterable[bytes]) -> None:
        """Keep marks until the object comes."""
        joined = joined_marks(self._marks.pop(key, set()), marks)
        if not joined:
            return
        self._marks[key] = joined
        self.note(key, joined)
        while len(self._marks) > self._most:
            self._lose(self._marks.popitem(last=False)[0])

    def take(self, key: ChunkKey) -> set[bytes]:
        """The marks of an object that comes."""
        marks = self._marks.pop(key, set())
        if self._lost is not None and all(self._lost[at] & bit for at, bit in _probes(key)):
            marks.update(_WILD)
            self.note(key, marks)
        return marks

    def take_noted(self, key: ChunkKey) -> set[bytes]:
        """The marks that were noted of an object that an earlier daemon had."""
        return self._marks.pop(key, set())

    def note(self, key: ChunkKey, marks: Iterable[bytes]) -> None:
        """Note the marks of an object, be it there or not."""
        self._notes.put(_MARKS + key, b"".join(marks))

    def drop(self, key: ChunkKey) -> None:
        """The owner deleted the object, its marks with it."""
        self._marks.pop(key, None)
        self._notes.put(_MARKS + key, None)

    def clear(self) -> None:
        """No object that comes now has marks."""
        for key in list(self._marks):
            self.drop(key)
        if self._lost is not None:
            for block in range(_LOST_BYTES // _BLOCK_BYTES):
                self._notes.put(_LOST + block.to_bytes(2, "little"), None)
        self._lost = None

    def _lose(self, key: ChunkKey) -> None:
        if self._lost is None:
            self._lost = bytearray(_LOST_BYTES)
        for at, bit in _probes(key):
            self._lost[at] |= bit
            block = at // _BLOCK_BYTES
            begin = block * _BLOCK_BYTES
            self._notes.put(_LOST + block.to_bytes(2, "little"), bytes(self._lost[begin : begin + _BLOCK_BYTES]))
        self._notes.put(_MARKS + key, None)


def _probes(key: ChunkKey) -> Iterable[tuple[int, int]]:
    """Which bits of the filter stand for a key, whose bytes are random already."""
    for n in range(_PROBES):
        place = int.from_bytes(key[8 * n : 8 * n + 8], "little") % (8 * _LOST_BYTES)
        yield place // 8, 1 << place % 8
