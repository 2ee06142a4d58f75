"""What a log of invalidations says of one chunk, without reading the whole log for each."""

import itertools
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import TypeVar

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.tiers.record import Record
from hotspan.tiers.stores.base import Found

_Fields = tuple[int | None, int | None, bytes | None]

_Entries = list[tuple[int, Scope]]
_Name = TypeVar("_Name", ChunkKey, int)

_MOST = 1 << 17
"""Invalidations by key or label that are known at a time, about 300 bytes each."""


class LogView:
    """Invalidations by what they name, so that a chunk is held against few of them.

    floor: what was stored at lower generations can't be judged: the log no longer says what was invalidated then, or
           it was so much that the older half of it was forgotten.
    """

    def __init__(self, floor: int = 0) -> None:
        self.floor = floor
        self._by_key: dict[ChunkKey, list[tuple[int, Scope]]] = defaultdict(list)
        self._by_label: dict[int, list[tuple[int, Scope]]] = defaultdict(list)
        self._broad: dict[_Fields, int] = {}  # whole tenants, adapters, models: the latest of each
        self._any_label: dict[_Fields, int] = {}  # the latest by label of each: they take what may have any label
        self._generations: deque[int] = deque()  # of what is known by key or label, one for each

    def add(self, generation: int, scope: Scope) -> None:
        """One more invalidation: it takes chunks of lower generations."""
        if scope.keys is not None:
            for key in scope.keys:
                self._by_key[key].append((generation, scope))
            self._generations.extend([generation] * len(scope.keys))
        else:
            fields = (scope.tenant, scope.adapter, scope.namespace)
            latest = self._any_label if scope.labels else self._broad
            latest[fields] = max(generation, latest.get(fields, 0))
        if scope.keys is None and scope.labels:
            self._by_label[min(scope.labels)].append((generation, scope))
            self._generations.append(generation)
        if len(self._generations) > _MOST:
            self._forget(self._generations[len(self._generations) // 2])

    def taken_at(self, key: ChunkKey, namespace: bytes, terms: Terms) -> int:
        """The generation of the latest invalidation that takes a chunk under these terms; the floor if none does."""
        named = [self._by_key[key]] if key in self._by_key else []
        named += [self._by_label[label] for label in terms.labels if label in self._by_label]
        found = [at for entries in named for at, scope in entries if scope.takes(key, namespace, terms)]
        for fields in itertools.product((None, terms.tenant), (None, terms.adapter), (None, namespace)):
            found.append(self._broad.get(fields, 0))
            found.append(self._any_label.get(fields, 0) if terms.is_wild else 0)
        return max(*found, self.floor)  # read last: what was forgotten meanwhile lies below it

    def _forget(self, floor: int) -> None:
        """Know nothing any more of what was invalidated up to a generation."""
        self.floor = max(self.floor, floor)
        self._by_key = _above(self._by_key, floor)
        self._by_label = _above(self._by_label, floor)
        self._generations = deque(generation for generation in self._generations if generation > floor)


def _above(named: Mapping[_Name, _Entries], floor: int) -> dict[_Name, _Entries]:
    kept = defaultdict(list)
    for name, entries in named.items():
        if newer := [entry for entry in entries if entry[0] > floor]:
            kept[name] = newer
    return kept


def readable(
    chunks: Iterable[Chunk],
    found: Mapping[ChunkKey, Found],
    view: LogView,
    namespace: bytes,
    payload_bytes: int,
    now_s: float,
) -> tuple[list[Found], list[ChunkKey]]:
    """Of what a store has of a text, what may be read; and the keys of what nobody may read any more.

    chunks: all of the text, parents before their children.

    A chunk may be read if its ancestors may, for an invalidation takes what stands on a chunk: behind a gap, or behind
    an ancestor that was stored anew at a later generation, it may have been taken with what it stood on then.
    """
    born: dict[ChunkKey, int] = {}  # of what may be read
    taken: dict[ChunkKey, int] = {}  # the latest invalidation of a chunk or of what it stands on
    alive: list[Found] = []
    dead: list[ChunkKey] = []
    for chunk in chunks:
        one = found.get(chunk.key)
        parent = chunk.parent
        at = taken.get(parent, 0) if parent is not None else 0
        if one is not None and is_of(one, Record(chunk.key, parent, namespace, payload_bytes, one.terms)):
            at = max(at, view.taken_at(chunk.key, namespace, one.terms))
            terms, stored = one.terms, one.record.terms.generation
            expired = terms.expires_s and now_s >= terms.expires_s
            if expired or terms.generation < at:
                dead.append(chunk.key)
            elif parent is None or parent in born:
                if parent is not None and stored < born[parent]:
                    dead.append(chunk.key)
                else:
                    born[chunk.key] = stored
                    alive.append(one)
        taken[chunk.key] = at
    return alive, dead


def is_of(found: Found, wanted: Record) -> bool:
    """Whether what was found is the chunk that is wanted: of its name, parent, namespace and size."""
    return found.record[:4] == wanted[:4]
