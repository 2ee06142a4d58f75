"""What was invalidated while somebody held a request's text: a queue, a warm-up, another server.

The cache forgets what it has when an invalidation comes, and what a request stores that runs or waits then. A text that
is held elsewhere is not known here. So a request says since when its text is held, and what was invalidated since is
remembered: such a request is computed, and leaves nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2.view import LogView

_NO_KEY = ChunkKey(bytes(32))


class Text(Protocol):
    """On what terms a request has a text: those without tags hold before chunk `tags_from`."""

    terms: Terms
    bare_terms: Terms
    tags_from: int


class Withdrawals:
    """Invalidations by the time at which they were carried out, in bounded memory: what is forgotten counts as all.

    Times are this machine's monotonic clock, in seconds, which all its processes share.
    """

    def __init__(self) -> None:
        self._view = LogView()

    def note(self, scopes: Iterable[Scope], now_s: float) -> None:
        """These were invalidated."""
        for scope in scopes:
            self._view.add(_at(now_s), scope)

    def first_of(self, text: Text, chunks: Sequence[Chunk] | None, namespace: bytes, held_since_s: float) -> int | None:
        """Index of the first chunk of a text that was invalidated since it is held; None if none was.

        chunks: of the text, in any order; None if their names are not known.
        """
        since = _at(held_since_s)
        if self._view.latest(text.terms.tenant) < since:
            return None
        named = None if chunks is None else self._view.named(text.terms.tenant, chunks)
        return self._first(text, named, namespace, since)

    def has_taken(self, texts: Iterable[Text], chunks: Sequence[Chunk], namespace: bytes, since_s: float) -> bool:
        """Whether one of these chunks was invalidated since then, on the terms of one of several texts of one tenant.

        The chunks are looked through once, and each terms are asked about once.
        """
        since, named, asked = _at(since_s), list[Chunk](), set[tuple[Terms, Terms, int]]()
        for text in texts:
            if not asked:
                if self._view.latest(text.terms.tenant) < since:
                    return False
                named = self._view.named(text.terms.tenant, chunks)
            terms = (text.terms, text.bare_terms, text.tags_from)
            if terms in asked:
                continue
            asked.add(terms)
            first = self._first(text, named, namespace, since)
            if first is not None and first < len(chunks):
                return True
        return False

    def _first(self, text: Text, named: Sequence[Chunk] | None, namespace: bytes, since: int) -> int | None:
        """As `first_of`, of a text of which only `named` may have been invalidated by name."""
        view = self._view
        if named is None or view.matched_at(_NO_KEY, namespace, text.bare_terms) >= since:
            return 0
        first = [chunk.index for chunk in named if view.matched_at(chunk.key, namespace, text.bare_terms) >= since]
        if view.matched_at(_NO_KEY, namespace, text.terms) >= since:
            first.append(text.tags_from)
        return min(first, default=None)


def _at(seconds: float) -> int:
    """As a generation; 0 is before all."""
    return max(1, int(seconds * 1e6))
