"""Which chunks carry a label of a tenant's, so that looking for a tag costs what has it, not what there is."""

from collections.abc import Iterable, Iterator

from hotspan.core.multimap import Multimap
from hotspan.core.terms import WINDOW, Scope, Terms
from hotspan.core.types import ChunkKey

_WILD = 0
"""The place of chunks that any label takes; no label is 0."""

_Place = tuple[int, int]
"""A tenant, and a label."""


class Labels:
    """An index of chunks by tenant and label. Each label of a chunk takes some 100 bytes; one without any, nothing."""

    def __init__(self) -> None:
        self._keys: Multimap[_Place, ChunkKey] = Multimap()

    def add(self, key: ChunkKey, terms: Terms) -> None:
        """A chunk is here on these terms."""
        for place in _places(terms):
            self._keys.add(place, key)

    def discard(self, key: ChunkKey, terms: Terms) -> None:
        """A chunk is not here on these terms any more."""
        for place in _places(terms):
            self._keys.discard(place, key)

    def candidates(self, scopes: Iterable[Scope], most: int) -> set[ChunkKey] | None:
        """All chunks that the scopes may take, and not many else. None if that is not known, or more than `most`.

        Nothing is known of scopes that name no tenant, or neither labels nor chunks.
        """
        found, places = set[ChunkKey](), set[_Place]()
        for scope in scopes:
            if scope.tenant is None or (scope.keys is None and not scope.labels):
                return None
            if scope.keys is not None:
                found |= scope.keys
                places.add((scope.tenant, WINDOW))
                continue
            of = [(scope.tenant, label) for label in scope.labels]
            places |= {min(of, key=self._keys.count), (scope.tenant, _WILD)}
        if sum(map(self._keys.count, places)) > most:
            return None
        return found.union(*map(self._keys.of, places))

    def check(self, terms: Iterable[tuple[ChunkKey, Terms]]) -> None:
        """Raise AssertionError if it has other chunks than these."""
        expected = {(place, key) for key, each in terms for place in _places(each)}
        if expected != {(place, key) for place in self._keys for key in self._keys.of(place)}:
            raise AssertionError("the index of labels knows other chunks than there are")


def _places(terms: Terms) -> Iterator[_Place]:
    for label in terms.labels:
        yield terms.tenant, label
    if terms.is_wild:
        yield terms.tenant, _WILD
