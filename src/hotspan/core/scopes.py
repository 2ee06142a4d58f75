"""Several scopes at once: which chunks they take, how a log keeps them, and how many are remembered."""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, NamedTuple

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey


class ScopeSet:
    """Whether any of several scopes takes a chunk, asked of many chunks: each is compared with few of the scopes."""

    def __init__(self, scopes: Iterable[Scope] = ()) -> None:
        self._numbers: dict[Scope, int] = {}
        self._tenants: Counter[int | None] = Counter()
        # The scopes of each are in the order of their numbers.
        self._broad: dict[_Owner, dict[Scope, None]] = {}  # those that name neither chunks nor labels
        self._keyed: dict[_Owner, dict[Scope, None]] = {}
        self._by_key: dict[ChunkKey, dict[Scope, None]] = {}
        self._labelled: dict[_Owner, dict[Scope, None]] = {}
        self._by_label: dict[int, dict[Scope, None]] = {}  # under one of their labels
        self.add(scopes)

    def add(self, scopes: Iterable[Scope], number: int = 0) -> None:
        """More scopes, under a number that is not below those before; one that is here already gets the new number."""
        for scope in scopes:
            if (known := self._numbers.get(scope)) is not None:
                self.discard([scope], known)
            self._numbers[scope] = number
            self._tenants[scope.tenant] += 1
            for index, name in self._places(scope):
                index.setdefault(name, {})[scope] = None

    def discard(self, scopes: Iterable[Scope], number: int) -> None:
        """Take out those of `scopes` that are here under this number."""
        for scope in scopes:
            if self._numbers.get(scope) != number:
                continue
            del self._numbers[scope]
            self._tenants[scope.tenant] -= 1
            if not self._tenants[scope.tenant]:
                del self._tenants[scope.tenant]
            for index, name in self._places(scope):
                del index[name][scope]
                if not index[name]:
                    del index[name]

    def __iter__(self) -> Iterator[Scope]:
        """In the order in which they came."""
        return iter(self._numbers)

    @property
    def keys(self) -> AbstractSet[ChunkKey]:
        """The chunks that they name."""
        return self._by_key.keys()

    @property
    def is_everything(self) -> bool:
        """Whether one of them takes everything."""
        return Scope() in self._numbers

    def concerns(self, tenant: int) -> bool:
        """Whether chunks of a tenant may be taken."""
        return tenant in self._tenants or None in self._tenants

    def takes(self, key: ChunkKey, namespace: bytes, terms: Terms) -> bool:
        """Whether one of them takes a chunk under these terms, not counting what it stands on."""
        return self.newest(key, namespace, terms) is not None

    def newest(self, key: ChunkKey, namespace: bytes, terms: Terms) -> int | None:
        """The greatest number of those that take a chunk, as `takes` says; None if none does."""
        if not self.concerns(terms.tenant):
            return None
        tried = [self._by_key.get(key), *(self._by_label.get(label) for label in terms.labels)]
        for owner in _owners(terms):
            tried.append(self._broad.get(owner))
            tried.append(self._labelled.get(owner) if terms.is_wild else None)
            tried.append(self._keyed.get(owner) if terms.is_window else None)
        newest = None
        for some in filter(None, tried):
            found = next((scope for scope in reversed(some) if scope.takes(key, namespace, terms)), None)
            if found is not None:
                newest = max(self._numbers[found], -1 if newest is None else newest)
        return newest

    def may_name(self, namespace: bytes, terms: Terms) -> bool:
        """Whether chunks under these terms may be among those that one of them names by key."""
        keyed = [scope for owner in _owners(terms) for scope in self._keyed.get(owner, ())]
        return any(without_keys(scope).takes(_NO_KEY, namespace, terms) for scope in keyed)

    def _places(self, scope: Scope) -> Iterator[tuple[dict[Any, dict[Scope, None]], Hashable]]:
        """Where a scope stands: the indexes, and the name in each."""
        owner = scope.tenant, scope.adapter
        if scope.keys is not None:
            yield self._keyed, owner
            yield from ((self._by_key, key) for key in scope.keys)
        elif scope.labels:
            yield self._labelled, owner
            yield self._by_label, min(scope.labels)
        else:
            yield self._broad, owner


_NO_KEY = ChunkKey(bytes(32))

_Owner = tuple[int | None, int | None]
"""Tenant and adapter, as a scope has them."""


def _owners(terms: Terms) -> list[_Owner]:
    """Those of the scopes that may take chunks under these terms."""
    return [(tenant, adapter) for tenant in (terms.tenant, None) for adapter in (terms.adapter, None)]


# -- as JSON -----------------------------------------------------------------------------------------------------------


def scopes_to_json(scopes: Sequence[Scope]) -> Any:
    """What an entry of a log keeps as its "scope": one scope as an object, as ever, and a batch as a list of them.

    A version that knows no batches takes a list for damage, and forgets everything.
    """
    return scopes[0].to_json() if len(scopes) == 1 else [scope.to_json() for scope in scopes]


def scopes_from_json(data: Any) -> tuple[Scope, ...]:
    """The scopes that `scopes_to_json` was given. Raises: KeyError, TypeError or ValueError for anything else."""
    if not isinstance(data, list):
        return (Scope.from_json(data),)
    if not data:
        raise ValueError("an invalidation has a scope")
    return tuple(map(Scope.from_json, data))


class Understood(NamedTuple):
    """The scopes of an entry. is_whole: whether all of it was understood; else they take more than it says."""

    scopes: tuple[Scope, ...]
    is_whole: bool


def understood_scopes(data: Any) -> Understood:
    """As `scopes_from_json`; a scope that can't be read takes all of its tenant, or everything if that is unreadable.

    Never raises: an entry that nobody understands may have invalidated anything.
    """
    try:
        return Understood(scopes_from_json(data), True)
    except (KeyError, TypeError, ValueError):
        parts = data if isinstance(data, list) and data else [data]
        return Understood(tuple(dict.fromkeys(map(_widened, parts))), False)


def _widened(data: Any) -> Scope:
    try:
        return Scope.from_json(data)
    except (KeyError, TypeError, ValueError):
        tenant = data.get("tenant") if isinstance(data, Mapping) else None
    is_label = isinstance(tenant, int) and not isinstance(tenant, bool) and 0 <= tenant < 1 << 64
    return Scope(tenant=tenant) if is_label else Scope()


# -- as many as can be remembered --------------------------------------------------------------------------------------


class Backlog:
    """Scopes that wait to be applied, in bounded memory: what is too much is widened, and no further than its tenant.

    scopes, keys: that one tenant may have waiting; with more, all of the tenant is taken. Of scopes that name no tenant
                  there may be as many; with more, everything is.
    total:        of scopes and keys, over all tenants; beyond it the tenant that has most is taken as a whole.
    """

    def __init__(self, scopes: int, keys: int = 1 << 14, total: int = 1 << 17) -> None:
        self._max_scopes, self._max_keys, self._max_total = scopes, keys, total
        self._of: dict[int | None, dict[Scope, None]] = {}
        self._weights: dict[int | None, int] = {}
        self._weight = 0

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def add(self, scopes: Iterable[Scope]) -> None:
        """More that is to be taken."""
        for scope in scopes:
            waiting, whole = self._of.setdefault(scope.tenant, {}), Scope(tenant=scope.tenant)
            if whole in waiting:
                continue
            if scope in waiting:
                del waiting[scope]  # the later one stands for both
                waiting[scope] = None
                continue
            waiting[scope] = None
            weight = 1 + len(scope.keys or ())
            self._weights[scope.tenant] = self._weights.get(scope.tenant, 0) + weight
            self._weight += weight
            keys = self._weights[scope.tenant] - len(waiting)
            if scope == whole or len(waiting) > self._max_scopes or keys > self._max_keys:
                self._widen(scope.tenant)
            while self._weight > self._max_total and max(self._weights.values()) > 1:
                self._widen(max(self._weights, key=self._weights.__getitem__))
        if self._weight > self._max_total:  # more tenants than that
            self._widen(None)

    def take(self) -> list[Scope]:
        """All that waits, which waits no more."""
        is_everything = Scope() in self._of.get(None, ())
        taken = [Scope()] if is_everything else [scope for some in self._of.values() for scope in some]
        self._of, self._weights, self._weight = {}, {}, 0
        return taken

    def _widen(self, tenant: int | None) -> None:
        if tenant is None:
            self._of, self._weights, self._weight = {}, {}, 0
        self._of[tenant] = {Scope(tenant=tenant): None}
        self._weight += 1 - self._weights.get(tenant, 0)
        self._weights[tenant] = 1


def without_keys(scope: Scope) -> Scope:
    """What else narrows a scope."""
    return scope if scope.keys is None else replace(scope, keys=None)
