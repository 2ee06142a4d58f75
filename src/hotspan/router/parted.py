"""A bounded table with entries of several owners, of whom none can push out what another one has few of.

owner a  [k][k][k][k][k]   full: the longest unused entry of the owner who has most goes
owner b  [k]
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Parted(Generic[K, V]):
    """Entries by owner and key. One owner alone may have all `max_entries`; each operation takes constant time.

    Of owners who have the same number, the one goes first who has had it for longest. So owners that are made up push
    out each other, and of one who has more of them what they could have taken.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._entries: dict[bytes, OrderedDict[K, V]] = {}
        self._sizes: dict[int, OrderedDict[bytes, None]] = {}  # owners by how many entries they have
        self._most = 0
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def get(self, owner: bytes, key: K) -> V | None:
        """The value of a key, whose use this is not; None without one."""
        entries = self._entries.get(owner)
        return None if entries is None else entries.get(key)

    def used(self, owner: bytes, key: K) -> V | None:
        """The value of a key, which counts as a use of it; None without one."""
        entries = self._entries.get(owner)
        if entries is None or key not in entries:
            return None
        entries.move_to_end(key)
        return entries[key]

    def put(self, owner: bytes, key: K, value: V) -> None:
        """Keep a value; another entry may go for it."""
        entries = self._entries.setdefault(owner, OrderedDict())
        before = len(entries)
        entries[key] = value
        entries.move_to_end(key)
        self._sized(owner, before)
        if self._length > self._max_entries:
            most = next(iter(self._sizes[self._most]))
            self.pop(most, next(iter(self._entries[most])))

    def pop(self, owner: bytes, key: K) -> V | None:
        """The value of a key, which is not kept any more; None without one."""
        entries = self._entries.get(owner)
        if entries is None or key not in entries:
            return None
        before = len(entries)
        value = entries.pop(key)
        self._sized(owner, before)
        return value

    def check(self) -> None:
        """Raise RuntimeError if the books don't balance."""
        sizes = {owner: len(entries) for owner, entries in self._entries.items()}
        known = {owner: size for size, owners in self._sizes.items() for owner in owners}
        if sizes != known or sum(sizes.values()) != self._length or self._length > self._max_entries:
            raise RuntimeError(f"{sizes} entries by owner, {known} are known, {self._length} in all")
        if max(sizes.values(), default=0) != self._most or 0 in known.values() or not all(self._sizes.values()):
            raise RuntimeError(f"{self._most} is not the most of {sizes}")

    def _sized(self, owner: bytes, before: int) -> None:
        """An owner has more or fewer entries than before, by at most one."""
        now = len(self._entries[owner])
        if now == before:
            return
        self._length += now - before
        if before:
            del self._sizes[before][owner]
            if not self._sizes[before]:
                del self._sizes[before]
        if now:
            self._sizes.setdefault(now, OrderedDict())[owner] = None
        else:
            del self._entries[owner]
        if now > self._most or self._most not in self._sizes:
            self._most = now  # it had the most, or has it now
