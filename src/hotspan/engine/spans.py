"""Texts in the engine's prefix cache, in spans of a chunk, found by what an invalidation may name.

Each span depends on the one before it in its text. A search costs what it finds, not what there is: an invalidation
runs on the scheduler's thread.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from hotspan.core.scopes import without_keys
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey

Name = bytes
"""The last of a span's block hashes, which names all tokens up to there."""

_MAX_EXPIRIES = 1024
"""Times that are remembered besides two of each span; what a span no longer expires at is dropped then."""

_NO_KEY = ChunkKey(bytes(32))

_Place = tuple[str, int | bytes | None]
"""An entry of the index: a kind of name, and the name."""


@dataclass(slots=True)
class Span:
    """Blocks of one chunk, or of the last piece of a text that is no whole one.

    hashes: the engine's names of the blocks.
    keys:   of the chunks in it, in every KV cache group; none for a piece. None: unknown (the tenant's keys or the
            adapter's files were not available), so that it may be any of its tenant's.
    """

    name: Name
    hashes: list[bytes]
    parent: Name | None
    terms: Terms
    keys: frozenset[ChunkKey] | None


def _places(span: Span) -> Iterator[_Place]:
    """Where the index has a span."""
    yield "tenant", span.terms.tenant
    if span.parent is not None:
        yield "parent", span.parent
    for label in span.terms.labels:
        yield "label", label
    if span.terms.is_wild:
        yield "wild", None
    if span.keys is None:
        yield "keyless", span.terms.tenant
        yield "keyless", None  # of any tenant
    for key in span.keys or ():
        yield "key", key


class Spans:
    """Spans by name, and by what an invalidation may name of them."""

    def __init__(self) -> None:
        self._spans: dict[Name, Span] = {}
        self._index: defaultdict[_Place, set[Name]] = defaultdict(set)
        self._expiries: list[tuple[int, Name]] = []
        self._turns: deque[Span] = deque()  # in which `prune` looks at them; those that are gone since among them
        self.looked_at = 0

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, name: Name) -> bool:
        return name in self._spans

    def terms(self, name: Name) -> Terms | None:
        """The terms of a span; None if there is none of that name."""
        span = self._spans.get(name)
        return None if span is None else span.terms

    def keep(self, span: Span) -> None:
        """One more use of these blocks: they are kept on the joined terms of all of them."""
        known = self._spans.get(span.name)
        if known is None:
            self._spans[span.name] = known = span
            self._turns.append(span)
            self._add(span)
        elif span.terms is not known.terms or span.keys != known.keys:
            self._remove(known)
            known.terms = known.terms.joined(span.terms)
            known.keys = None if known.keys is None or span.keys is None else known.keys | span.keys
            self._add(known)
        if span.terms.expires_s:
            heapq.heappush(self._expiries, (known.terms.expires_s, span.name))
            if len(self._expiries) > _MAX_EXPIRIES + 2 * len(self._spans):
                self._expiries = [(at, name) for name, each in self._spans.items() if (at := each.terms.expires_s)]
                heapq.heapify(self._expiries)

    def pop(self, name: Name) -> Span:
        """Forget one."""
        span = self._spans.pop(name)
        self._remove(span)
        return span

    def matched(self, scopes: Iterable[Scope], namespace: bytes) -> set[Name]:
        """The spans that any of these scopes takes, and their descendants."""
        found: set[Name] = set()
        for scope in scopes:
            narrow, candidates = without_keys(scope), self._candidates(scope)
            self.looked_at += len(candidates)
            found |= {name for name in candidates if narrow.takes(_NO_KEY, namespace, self._spans[name].terms)}
        return self._with_descendants(found)

    def expired(self, now_s: float) -> set[Name]:
        """The spans whose time is over, and their descendants."""
        found: set[Name] = set()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, name = heapq.heappop(self._expiries)
            span = self._spans.get(name)
            if span is not None and 0 < span.terms.expires_s <= now_s:
                found.add(name)
        return self._with_descendants(found)

    def prune(self, count: int, is_there: Callable[[Span], bool]) -> None:
        """Look at the next `count` spans, and forget those that are not there."""
        for _ in range(min(count, len(self._turns))):
            span = self._turns.popleft()
            if self._spans.get(span.name) is not span:
                continue
            if is_there(span):
                self._turns.append(span)
            else:
                self.pop(span.name)

    def check(self) -> None:
        """Raise AssertionError if spans and index do not agree."""
        assert all(name == span.name == span.hashes[-1] for name, span in self._spans.items())
        indexed = {(place, name) for place, names in self._index.items() for name in names}
        assert indexed == {(place, name) for name, span in self._spans.items() for place in _places(span)}
        assert {span.name for span in self._turns} >= self._spans.keys()

    def _add(self, span: Span) -> None:
        for place in _places(span):
            self._index[place].add(span.name)

    def _remove(self, span: Span) -> None:
        for place in _places(span):
            names = self._index[place]
            names.discard(span.name)
            if not names:
                del self._index[place]

    def _at(self, *place: int | bytes | str | None) -> AbstractSet[Name]:
        return self._index.get(place, frozenset())  # type: ignore[arg-type]

    def _candidates(self, scope: Scope) -> AbstractSet[Name]:
        """All that a scope may take, and not much else."""
        if scope.keys is not None:
            return set(self._at("keyless", scope.tenant)).union(*(self._at("key", key) for key in scope.keys))
        if scope.labels:
            return min((self._at("label", label) for label in scope.labels), key=len) | self._at("wild", None)
        return self._spans.keys() if scope.tenant is None else self._at("tenant", scope.tenant)

    def _with_descendants(self, names: set[Name]) -> set[Name]:
        todo = list(names)
        while todo:
            fresh = self._at("parent", todo.pop()) - names
            names |= fresh
            todo.extend(fresh)
        return names
