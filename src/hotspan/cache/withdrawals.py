"""What was invalidated while somebody held a request's text: a queue, a warm-up, another server.

The cache forgets what it has when an invalidation comes, and what a request stores that runs or waits then. A text that
is held elsewhere is not known here. So a request says since when its text is held, and what was invalidated since is
remembered: such a request is computed, and leaves nothing.
"""

from collections.abc import Iterable, Sequence

from hotspan.cache.entry import Reader
from hotspan.core.terms import Scope
from hotspan.core.types import Chunk, ChunkKey
from hotspan.l2.view import LogView

_NO_KEY = ChunkKey(bytes(32))


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

    def first_of(
        self, reader: Reader, chunks: Sequence[Chunk] | None, namespace: bytes, held_since_s: float
    ) -> int | None:
        """Index of the first chunk of a text that was invalidated since it is held; None if none was.

        chunks: of the text, in any order; None if their names are not known.
        """
        since, view = _at(held_since_s), self._view
        if view.latest(reader.terms.tenant) < since:
            return None
        if chunks is None or view.matched_at(_NO_KEY, namespace, reader.bare_terms) >= since:
            return 0
        first = [chunk.index for chunk in chunks if view.matched_at(chunk.key, namespace, reader.bare_terms) >= since]
        if view.matched_at(_NO_KEY, namespace, reader.terms) >= since:
            first.append(reader.tags_from)
        return min(first, default=None)


def _at(seconds: float) -> int:
    """As a generation; 0 is before all."""
    return max(1, int(seconds * 1e6))
