"""Several scopes at once: which chunks they take, how a log keeps them, and how many are remembered."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey


class ScopeSet:
    """Whether any of several scopes takes a chunk, asked of many chunks: each is held against few of the scopes.

    keys: the chunks that they name.
    """

    def __init__(self, scopes: Iterable[Scope]) -> None:
        self._broad: dict[int | None, list[Scope]] = {}  # by tenant: those that name neither chunks nor labels
        self._keyed: dict[int | None, list[Scope]] = {}
        self._by_key: dict[ChunkKey, list[Scope]] = {}
        self._labelled: dict[int | None, list[Scope]] = {}
        self._by_label: dict[int, list[Scope]] = {}  # under one of their labels
        for scope in dict.fromkeys(scopes):
            if scope.keys is not None:
                self._keyed.setdefault(scope.tenant, []).append(scope)
                for key in scope.keys:
                    self._by_key.setdefault(key, []).append(scope)
            elif scope.labels:
                self._labelled.setdefault(scope.tenant, []).append(scope)
                self._by_label.setdefault(min(scope.labels), []).append(scope)
            else:
                self._broad.setdefault(scope.tenant, []).append(scope)
        self.keys = frozenset(self._by_key)
        self._tenants = {*self._broad, *self._keyed, *self._labelled}

    @property
    def is_everything(self) -> bool:
        """Whether one of them takes everything."""
        return Scope() in self._broad.get(None, ())

    def concerns(self, tenant: int) -> bool:
        """Whether chunks of a tenant may be taken."""
        return tenant in self._tenants or None in self._tenants

    def takes(self, key: ChunkKey, namespace: bytes, terms: Terms) -> bool:
        """Whether one of them takes a chunk under these terms, not counting what it stands on."""
        if not self.concerns(terms.tenant):
            return False
        tried = [self._by_key.get(key, ()), *(self._by_label.get(label, ()) for label in terms.labels)]
        for tenant in (terms.tenant, None):
            tried.append(self._broad.get(tenant, ()))
            tried.append(self._labelled.get(tenant, ()) if terms.is_wild else ())
        return any(scope.takes(key, namespace, terms) for some in tried for scope in some)

    def may_name(self, namespace: bytes, terms: Terms) -> bool:
        """Whether chunks under these terms may be among those that one of them names by key."""
        keyed = [scope for tenant in (terms.tenant, None) for scope in self._keyed.get(tenant, ())]
        return any(without_keys(scope).takes(_NO_KEY, namespace, terms) for scope in keyed)


_NO_KEY = ChunkKey(bytes(32))


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
        self._most_scopes, self._most_keys, self._most = scopes, keys, total
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
            if scope == whole or len(waiting) > self._most_scopes or keys > self._most_keys:
                self._widen(scope.tenant)
            while self._weight > self._most and max(self._weights.values()) > 1:
                self._widen(max(self._weights, key=self._weights.__getitem__))
        if self._weight > self._most:  # more tenants than that
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
