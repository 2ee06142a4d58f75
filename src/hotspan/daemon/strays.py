"""Marks of objects that are not there: not yet, or not any more."""

from collections import OrderedDict
from collections.abc import Iterable

from hotspan.core.terms import Terms
from hotspan.core.types import MIB, ChunkKey
from hotspan.daemon.stored import joined_marks
from hotspan.tiers.stores.base import marks_of

MOST_STRAYS = 1 << 16
"""Objects whose marks are kept; the marks of more are remembered as lost."""

_LOST_BYTES = 4 * MIB
_PROBES = 3
_WILD = marks_of(Terms(is_wild=True), 0)


class StrayMarks:
    """What an object's terms will be joined with when it comes.

    Marks can get lost where too many are kept, and not unnoticed: an object whose marks were lost comes back wild, so
    that any tag takes it. Which objects these are is a Bloom filter: a million lost ones make 1 in 1,000 others wild.
    """

    def __init__(self, most: int = MOST_STRAYS) -> None:
        self._most = most
        self._marks: OrderedDict[ChunkKey, set[bytes]] = OrderedDict()
        self._lost: bytearray | None = None

    def __len__(self) -> int:
        return len(self._marks)

    def add(self, key: ChunkKey, marks: Iterable[bytes]) -> None:
        """Keep marks until the object comes."""
        joined = joined_marks(self._marks.pop(key, set()), marks)
        if not joined:
            return
        self._marks[key] = joined
        if len(self._marks) > self._most:
            self._lose(self._marks.popitem(last=False)[0])

    def take(self, key: ChunkKey) -> set[bytes]:
        """The marks of an object that comes."""
        marks = self._marks.pop(key, set())
        if self._lost is not None and all(self._lost[at] & bit for at, bit in _probes(key)):
            marks.update(_WILD)
        return marks

    def drop(self, key: ChunkKey) -> None:
        """The owner deleted the object, its marks with it."""
        self._marks.pop(key, None)

    def clear(self) -> None:
        """No object that comes now has marks."""
        self._marks.clear()
        self._lost = None

    def _lose(self, key: ChunkKey) -> None:
        if self._lost is None:
            self._lost = bytearray(_LOST_BYTES)
        for at, bit in _probes(key):
            self._lost[at] |= bit


def _probes(key: ChunkKey) -> Iterable[tuple[int, int]]:
    """Which bits of the filter stand for a key, whose bytes are random already."""
    for n in range(_PROBES):
        place = int.from_bytes(key[8 * n : 8 * n + 8], "little") % (8 * _LOST_BYTES)
        yield place // 8, 1 << place % 8
