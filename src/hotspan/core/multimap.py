"""Sets of values by key, where most keys have one value."""

from collections.abc import Iterator
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Multimap(Generic[K, V]):
    """The first value of a key stands there bare: a set for each key would cost 200 bytes, and the garbage collector
    would visit each of them.
    """

    __slots__ = ("_first", "_others")

    def __init__(self) -> None:
        self._first: dict[K, V] = {}
        self._others: dict[K, set[V]] = {}  # of keys that have several

    def __len__(self) -> int:
        return len(self._first)

    def __contains__(self, key: K) -> bool:
        return key in self._first

    def __iter__(self) -> Iterator[K]:
        return iter(self._first)

    def add(self, key: K, value: V) -> None:
        """Add a value, if the key does not have it."""
        first = self._first.setdefault(key, value)
        if first != value:
            self._others.setdefault(key, set()).add(value)

    def discard(self, key: K, value: V) -> bool:
        """Remove a value, if the key has it; whether that was the last."""
        others = self._others.get(key)
        if self._first.get(key) != value:
            if others is not None:
                others.discard(value)
        elif others is None:
            del self._first[key]
            return True
        else:
            self._first[key] = others.pop()
        if not others:
            self._others.pop(key, None)
        return False

    def count(self, key: K) -> int:
        """How many values a key has."""
        return (key in self._first) + len(self._others.get(key, ()))

    def of(self, key: K) -> set[V]:
        """The values of a key, in a set of its own."""
        return {self._first[key], *self._others.get(key, ())} if key in self._first else set()
