"""Texts in the engine's prefix cache, in spans of a chunk, found by what an invalidation may name.

A span stands on the one before it in its text. Whatever is looked for costs what is found, not what there is: an
invalidation runs on the scheduler's thread.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey

Name = bytes
"""The last of a span's block hashes, which names all tokens up to there."""

_MAX_EXPIRIES = 1024
"""Times that are remembered besides two of each span; what a span no longer expires at is dropped then."""


@dataclass(slots=True)
class Span:
    """Blocks of one chunk, or of the last piece of a text that is no whole one.

    hashes: the engine's names of the blocks.
    keys:   of the chunks in it, in every KV cache group; none for a piece. None: they could not be told (the tenant's
            keys or the adapter's files were not to be had), so that it may be any of its tenant's.
    """

    name: Name
    hashes: list[bytes]
    parent: Name | None
    terms: Terms
    keys: frozenset[ChunkKey] | None


class Spans:
    """Spans by name, by key, by label and by tenant, with what stands on each."""

    def __init__(self) -> None:
        self._spans: dict[Name, Span] = {}
        self._children: defaultdict[Name, set[Name]] = defaultdict(set)
        self._by_tenant: defaultdict[int, set[Name]] = defaultdict(set)
        self._by_label: defaultdict[int, set[Name]] = defaultdict(set)
        self._by_key: defaultdict[ChunkKey, set[Name]] = defaultdict(set)
        self._wild: set[Name] = set()
        self._keyless: defaultdict[int, set[Name]] = defaultdict(set)  # by tenant
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
            if span.parent is not None:
                self._children[span.parent].add(span.name)
            self._by_tenant[span.terms.tenant].add(span.name)
            self._turns.append(span)
            self._index(span)
        elif span.terms is not known.terms or span.keys != known.keys:
            self._unindex(known)
            known.terms = known.terms.joined(span.terms)
            both_known = known.keys is not None and span.keys is not None
            known.keys = (known.keys or frozenset()) | (span.keys or frozenset()) if both_known else None
            self._index(known)
        if span.terms.expires_s:
            heapq.heappush(self._expiries, (known.terms.expires_s, span.name))
            if len(self._expiries) > _MAX_EXPIRIES + 2 * len(self._spans):
                self._expiries = [(at, name) for name, each in self._spans.items() if (at := each.terms.expires_s)]
                heapq.heapify(self._expiries)

    def pop(self, name: Name) -> Span:
        """Forget one."""
        span = self._spans.pop(name)
        if span.parent is not None:
            _discard(self._children, span.parent, name)
        _discard(self._by_tenant, span.terms.tenant, name)
        self._unindex(span)
        return span

    def matched(self, scopes: Iterable[Scope], namespace: bytes) -> set[Name]:
        """The spans that any of these scopes takes, and what stands on them."""
        found: set[Name] = set()
        for scope in scopes:
            narrow = replace(scope, keys=None)
            candidates = self._candidates(scope)
            self.looked_at += len(candidates)
            found |= {name for name in candidates if narrow.takes(_NO_KEY, namespace, self._spans[name].terms)}
        return self.with_descendants(found)

    def expired(self, now_s: float) -> set[Name]:
        """The spans whose time is over, and what stands on them."""
        found: set[Name] = set()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, name = heapq.heappop(self._expiries)
            span = self._spans.get(name)
            if span is not None and 0 < span.terms.expires_s <= now_s:
                found.add(name)
        return self.with_descendants(found)

    def with_descendants(self, names: set[Name]) -> set[Name]:
        """These and all that stands on them."""
        todo = list(names)
        while todo:
            fresh = self._children.get(todo.pop(), set()) - names
            names |= fresh
            todo.extend(fresh)
        return names

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
        """Raise AssertionError if the books do not agree."""
        for name, span in self._spans.items():
            assert name == span.name == span.hashes[-1]
            assert name in self._by_tenant[span.terms.tenant]
            assert all(name in self._by_label[label] for label in span.terms.labels)
            assert all(name in self._by_key[key] for key in span.keys or ())
            assert (name in self._wild) == span.terms.is_wild
            assert (name in self._keyless.get(span.terms.tenant, ())) == (span.keys is None)
            assert span.parent is None or name in self._children[span.parent]
        everywhere = [self._children, self._by_tenant, self._by_label, self._by_key, self._keyless]
        assert all(names <= self._spans.keys() for index in everywhere for names in index.values())
        assert self._wild <= self._spans.keys()
        assert {span.name for span in self._turns} >= self._spans.keys()

    def _index(self, span: Span) -> None:
        for label in span.terms.labels:
            self._by_label[label].add(span.name)
        if span.terms.is_wild:
            self._wild.add(span.name)
        for key in span.keys or ():
            self._by_key[key].add(span.name)
        if span.keys is None:
            self._keyless[span.terms.tenant].add(span.name)

    def _unindex(self, span: Span) -> None:
        for label in span.terms.labels:
            _discard(self._by_label, label, span.name)
        for key in span.keys or ():
            _discard(self._by_key, key, span.name)
        _discard(self._keyless, span.terms.tenant, span.name)
        self._wild.discard(span.name)

    def _candidates(self, scope: Scope) -> set[Name]:
        """All that a scope may take, and not much else."""
        if scope.keys is not None:
            found = set().union(*(self._by_key[key] for key in scope.keys if key in self._by_key))
            tenants = self._keyless if scope.tenant is None else [scope.tenant]
            return found.union(*(self._keyless.get(tenant, ()) for tenant in tenants))
        if scope.labels:
            rarest = min((self._by_label.get(label, set()) for label in scope.labels), key=len)
            return rarest | self._wild
        return set(self._spans) if scope.tenant is None else set(self._by_tenant.get(scope.tenant, ()))


_NO_KEY = ChunkKey(bytes(32))


def _discard(index: defaultdict[int, set[Name]] | defaultdict[bytes, set[Name]], at: int | bytes, name: Name) -> None:
    names = index.get(at)  # type: ignore[arg-type]
    if names is not None:
        names.discard(name)
        if not names:
            del index[at]  # type: ignore[arg-type]
