"""What a log of invalidations says of one chunk, without reading the whole log for each."""

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import TypeVar

from hotspan.core.scopes import without_keys
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2 import bounds
from hotspan.l2.base import Found
from hotspan.tiers.record import Record

_Fields = tuple[int | None, bytes | None]
_Entries = tuple[tuple[int, Scope], ...]
_Name = TypeVar("_Name", ChunkKey, int)

_MAX_SCOPES = 1 << 17
"""Invalidations by what they name that are known at a time, of all tenants; about 400 bytes each."""

_MAX_OF_A_NAME = 256
"""Of one key or label; with more, all that has that key or label is taken."""

_MAX_TENANTS = 1 << 14


class LogView:
    """Invalidations by tenant and by what they name, so that a chunk is held against few of them.

    floor: what was stored at lower generations can't be judged, whosever it is: the log no longer says what was
           invalidated then.

    What it knows is bounded: where it is too much, the tenant that has most of it loses the older half, and has a floor
    of its own from then on. The invalidations that name no tenant count as one tenant's, whose floor is everybody's.
    One thread adds, others may look at the same time: what they look at is replaced, never changed.
    """

    def __init__(self, floor: int = 0) -> None:
        self._of: dict[int | None, _TenantView] = {None: _TenantView(floor)}
        self._count = 0

    @property
    def floor(self) -> int:
        """Everybody's."""
        return self._of[None].floor

    def __len__(self) -> int:
        return self._count

    def add(self, generation: int, scope: Scope) -> None:
        """One more invalidation: it takes chunks of lower generations."""
        view = self._of.get(scope.tenant)
        if view is None:
            view = self._of[scope.tenant] = _TenantView(0)
        self._count += view.add(generation, scope)
        while self._count > _MAX_SCOPES:
            largest = max(self._of.values(), key=len)
            self._count -= len(largest)
            largest.forget_half()
            self._count += len(largest)
        if len(self._of) > _MAX_TENANTS:
            self._forget_tenants()

    def matched_at(self, key: ChunkKey, namespace: bytes, terms: Terms) -> int:
        """The generation of the latest invalidation that takes a chunk under these terms; the floor if none does."""
        own = self._of.get(terms.tenant)
        at = 0 if own is None else own.matched_at(key, namespace, terms)
        return max(at, self._of[None].matched_at(key, namespace, terms))

    def named(self, tenant: int, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Those of a tenant's chunks that invalidations named one by one; the others go by their terms alone."""
        views = (self._of.get(tenant), self._of[None])
        keys = [view.keys for view in views if view is not None and view.keys]
        return [chunk for chunk in chunks if any(chunk.key in some for some in keys)] if keys else []

    def latest(self, tenant: int) -> int:
        """The generation of the latest invalidation that may take chunks of a tenant; the floor if there is none."""
        own = self._of.get(tenant)
        return max(0 if own is None else own.latest, self._of[None].latest)

    def _forget_tenants(self) -> None:
        """Know nothing any more of the half of the tenants whose invalidations are the oldest."""
        known = sorted((view.latest, tenant) for tenant, view in self._of.items() if tenant is not None)
        old = known[: len(known) // 2]
        self._of[None].raise_floor(old[-1][0])
        for _, tenant in old:
            self._count -= len(self._of.pop(tenant))


class _TenantView:
    """One tenant's invalidations, or those that name none.

    floor:  what was invalidated up to this generation is not known: everything of the tenant counts as taken.
    latest: the generation of the newest.
    """

    def __init__(self, floor: int) -> None:
        self.floor = self.latest = floor
        self._by_key: dict[ChunkKey, _Entries] = {}
        self._by_label: dict[int, _Entries] = {}
        self._broad: dict[_Fields, int] = {}  # by neither: the latest of each adapter and model
        self._any_label: dict[_Fields, int] = {}  # by label, likewise: what may have any label goes by these
        self._any_key: dict[_Fields, int] = {}  # by key, likewise: windows go by these
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def keys(self) -> AbstractSet[ChunkKey]:
        """Of the chunks that are named one by one."""
        return self._by_key.keys()

    def add(self, generation: int, scope: Scope) -> int:
        """How many more invalidations there are to remember."""
        before, narrow = self._count, without_keys(scope)
        latest = self._any_key if scope.keys is not None else self._any_label if scope.labels else self._broad
        fields = (scope.adapter, scope.namespace)
        self._count += fields not in latest
        latest[fields] = max(generation, latest.get(fields, 0))
        for key in scope.keys or ():
            self._put(self._by_key, key, generation, narrow, Scope(tenant=scope.tenant))
        if scope.labels and scope.keys is None:
            rarest = min(scope.labels, key=lambda label: len(self._by_label.get(label, ())))
            wider = Scope(tenant=scope.tenant, labels=frozenset([rarest]))
            self._put(self._by_label, rarest, generation, scope, wider)
        self.latest = max(self.latest, generation)
        return self._count - before

    def matched_at(self, key: ChunkKey, namespace: bytes, terms: Terms) -> int:
        named = [self._by_key.get(key, ())]
        named += [self._by_label.get(label, ()) for label in terms.labels]
        found = [at for entries in named for at, scope in entries if scope.takes(key, namespace, terms)]
        for fields in itertools.product((None, terms.adapter), (None, namespace)):
            found.append(self._broad.get(fields, 0))
            found.append(self._any_label.get(fields, 0) if terms.is_wild else 0)
            found.append(self._any_key.get(fields, 0) if terms.is_window else 0)
        return max(*found, self.floor)  # read last: what was forgotten meanwhile lies below it

    def forget_half(self) -> None:
        """Know nothing any more of the older half."""
        named = [*self._by_key.values(), *self._by_label.values()]
        generations = [generation for entries in named for generation, _ in entries]
        generations += [at for latest in self._latest() for at in latest.values()]
        self.raise_floor(sorted(generations)[len(generations) // 2])

    def raise_floor(self, floor: int) -> None:
        """Know nothing any more of what was invalidated up to a generation."""
        self.floor = max(self.floor, floor)
        self.latest = max(self.latest, floor)
        self._by_key, self._by_label = _above(self._by_key, floor), _above(self._by_label, floor)
        self._broad = {fields: at for fields, at in self._broad.items() if at > floor}
        self._any_label = {fields: at for fields, at in self._any_label.items() if at > floor}
        self._any_key = {fields: at for fields, at in self._any_key.items() if at > floor}
        named = [*self._by_key.values(), *self._by_label.values()]
        self._count = sum(map(len, [*named, *self._latest()]))

    def _latest(self) -> tuple[dict[_Fields, int], ...]:
        return self._broad, self._any_label, self._any_key

    def _put(self, named: dict[_Name, _Entries], name: _Name, generation: int, scope: Scope, wider: Scope) -> None:
        old: _Entries = named.get(name, ())
        others: _Entries = tuple(entry for entry in old if entry[1] != scope)
        is_crowded = len(others) >= _MAX_OF_A_NAME
        entries: _Entries = ((generation, wider),) if is_crowded else (*others, (generation, scope))
        self._count += len(entries) - len(old)
        named[name] = entries


def _above(named: Mapping[_Name, _Entries], floor: int) -> dict[_Name, _Entries]:
    kept = {name: tuple(entry for entry in entries if entry[0] > floor) for name, entries in named.items()}
    return {name: entries for name, entries in kept.items() if entries}


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
    an ancestor that was stored anew at a later generation, it may have been taken with what it stood on then; unless
    nothing of its tenant was invalidated since it was stored.
    """
    born: dict[ChunkKey, int] = {}  # of what may be read
    taken: dict[ChunkKey, int] = {}  # the latest invalidation of a chunk or of what it stands on
    alive: list[Found] = []
    dead: list[ChunkKey] = []
    for chunk in chunks:
        one = found.get(chunk.key)
        parent = chunk.parent
        at = taken.get(parent, 0) if parent is not None else 0
        if one is not None and is_of(one, Record(chunk.key, parent, namespace, payload_bytes, one.terms), now_s):
            at = max(at, view.matched_at(chunk.key, namespace, one.terms))
            terms, stored = one.terms, one.record.terms.generation
            expired = terms.expires_s and now_s >= terms.expires_s
            if expired or terms.generation < at:
                dead.append(chunk.key)
            elif parent is None or parent in born:
                if parent is not None and stored < min(born[parent], view.latest(terms.tenant)):
                    dead.append(chunk.key)
                else:
                    born[chunk.key] = stored
                    alive.append(one)
        taken[chunk.key] = at
    return alive, dead


def is_of(found: Found, wanted: Record, now_s: float) -> bool:
    """Whether what was found is the chunk that is wanted: of its name, parent, namespace and size.

    Of a generation that no log has come to it would outlive all that is invalidated: it is none.
    """
    record = found.record
    if not all(bounds.is_honest(terms.generation, now_s) for terms in (found.terms, record.terms)):
        return False
    is_named = record[:3] == wanted[:3] and record.chunk_bytes == wanted.chunk_bytes
    return is_named and record.payload_bytes <= record.chunk_bytes
