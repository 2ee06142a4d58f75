"""Texts in the engine's prefix cache, in spans of a chunk, found by what an invalidation may name.

Each span depends on the one before it in its text. A search costs what it finds, not what there is: an invalidation
runs on the scheduler's thread.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet

from msgspec import Struct

from hotspan.core.expiries import Expiries
from hotspan.core.multimap import Multimap
from hotspan.core.scopes import without_keys
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey

Name = bytes
"""The last of a span's block hashes, which names all tokens up to there."""

_NO_KEY = ChunkKey(bytes(32))

_Place = int | bytes | None
"""What a span is found by."""


class Span(Struct, eq=False, gc=False):
    """Blocks of one chunk, or of the last piece of a text that is no whole one. The garbage collector does not track it
    (`Chunk`).

    hashes: the engine's names of the blocks.
    keys:   of the chunks in it, in every KV cache group; none for a piece. None: unknown (the tenant's keys or the
            adapter's files were not available), so that it may be any of its tenant's.
    """

    name: Name
    hashes: tuple[bytes, ...]
    parent: Name | None
    terms: Terms
    keys: tuple[ChunkKey, ...] | None


def _places(span: Span) -> Iterator[tuple[str, _Place]]:
    """Where the index has a span: a kind of name, and the name."""
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
        self._index: defaultdict[str, Multimap[_Place, Name]] = defaultdict(Multimap)
        self._expiries = Expiries(self._expiring)
        self._turns: deque[Span] = deque()  # in which `prune` looks at them; those that are gone since among them
        self.looked_at = 0

    def __len__(self) -> int:
        return len(self._spans)

    def __contains__(self, name: Name) -> bool:
        return name in self._spans

    def names(self) -> set[Name]:
        """Those of all spans."""
        return set(self._spans)

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
            both = None if known.keys is None or span.keys is None else dict.fromkeys(known.keys + span.keys)
            known.keys = None if both is None else tuple(both)
            self._add(known)
        if span.terms.expires_s:
            self._expiries.note(known.terms.expires_s, span.name, len(self._spans))

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
        for name in self._expiries.due(now_s):
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
        indexed = {
            ((kind, place), name)
            for kind, places in self._index.items()
            for place in places
            for name in places.of(place)
        }
        assert indexed == {(place, name) for name, span in self._spans.items() for place in _places(span)}
        assert {span.name for span in self._turns} >= self._spans.keys()

    def _add(self, span: Span) -> None:
        for kind, place in _places(span):
            self._index[kind].add(place, span.name)

    def _remove(self, span: Span) -> None:
        for kind, place in _places(span):
            self._index[kind].discard(place, span.name)

    def _at(self, kind: str, place: _Place) -> set[Name]:
        return self._index[kind].of(place)

    def _expiring(self) -> list[tuple[int, Name]]:
        return [(span.terms.expires_s, name) for name, span in self._spans.items() if span.terms.expires_s]

    def _candidates(self, scope: Scope) -> AbstractSet[Name]:
        """All that a scope may take, and not much else."""
        if scope.keys is not None:
            return self._at("keyless", scope.tenant).union(*(self._at("key", key) for key in scope.keys))
        if scope.labels:
            rarest = min(scope.labels, key=self._index["label"].count)
            return self._at("label", rarest) | self._at("wild", None)
        return self._spans.keys() if scope.tenant is None else self._at("tenant", scope.tenant)

    def _with_descendants(self, names: set[Name]) -> set[Name]:
        todo = list(names)
        while todo:
            fresh = self._at("parent", todo.pop()) - names
            names |= fresh
            todo.extend(fresh)
        return names
