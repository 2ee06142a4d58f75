"""The last requests of each tenant: what their chunks are called, and no text.

An earlier request that began with the same chunks tells how far two texts agree, and what should have been a hit.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hotspan.core.terms import Terms
from hotspan.core.types import Chunk

NAME_BYTES: Final = 8
"""Kept of a chunk's name: enough to tell the chunks of a tenant apart."""

_PAST_BYTES: Final = 600
"""What is kept of a request besides."""

MAX_BYTES: Final = 8 << 20
"""Kept of all tenants."""


@dataclass(slots=True, eq=False, kw_only=True)
class Past:
    """A request that began to run.

    salt, owner, namespace: what its names are made of besides its tokens; the owner is namespace, tenant and adapter
              (`ChunkKeyer`). form: of its template's options, 0 for the model's own.
    head:     of its first tokens alone; 0 if it has too few, or none.
    names:    of its complete chunks: of its prompt, and when it ended of its answer, too.
    terms, bare_terms, tags_from: on which it keeps them (`Reader`). expires_s: until when (Unix); 0 for ever.
    unstored: the reason for which nothing of it is kept. refused_from: the first chunk that RAM had no room for.
    computed_chunks: how many it had computed when it ended; None while it runs.
    keeps_answer: its answer is stored.
    explained: why its tokens were computed, once that is known.
    """

    request_id: str
    began_s: float
    prompt_tokens: int
    prompt_chunks: int
    salt: str | None
    owner: bytes
    namespace: bytes
    form: int
    head: int
    names: bytes
    terms: Terms
    bare_terms: Terms
    tags_from: int
    expires_s: int = 0
    unstored: str | None = None
    refused_from: int | None = None
    computed_chunks: int | None = None
    keeps_answer: bool = True
    explained: Any = None
    size: int = field(default=0)

    @property
    def chunks(self) -> int:
        """How many complete chunks its text has."""
        return len(self.names) // NAME_BYTES

    def has(self, index: int, name: bytes) -> bool:
        """Whether its chunk at `index` has that name."""
        return self.names.startswith(name, index * NAME_BYTES)


class Nearest(NamedTuple):
    """The earlier request that agrees longest with another, the latest of several; and in how many chunks."""

    past: Past | None
    chunks: int


class History:
    """Of one engine. One thread calls it.

    requests: how many are kept of a tenant.
    """

    def __init__(self, requests: int, max_bytes: int = MAX_BYTES) -> None:
        self._requests = requests
        self._max_bytes = max_bytes
        self._bytes = 0
        self._of: OrderedDict[int, deque[Past]] = OrderedDict()  # tenants, those that asked last at the end

    @property
    def size(self) -> int:
        """About how much is kept."""
        return self._bytes

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def add(self, past: Past) -> None:
        """A request began: it is the tenant's last one."""
        kept = self._of.setdefault(past.terms.tenant, deque())
        self._of.move_to_end(past.terms.tenant)
        kept.append(past)
        self._weigh(past)
        if len(kept) > self._requests:
            self._drop(kept)
        self._bound()

    def extend(self, past: Past, names: bytes) -> None:
        """A request ended: its answer has names, too."""
        if past.size:
            past.names = names
            self._weigh(past)
            self._bound()

    def last(self, tenant: int | None = None) -> Iterator[Past]:
        """The requests of one tenant, or of all, the latest of each first."""
        for kept in self._of.values() if tenant is None else [self._of.get(tenant, ())]:
            yield from reversed(kept)

    def nearest(self, tenant: int, names: bytes) -> Nearest:
        """The earlier request that agrees longest with a text of these names. Costs about 0.1 us a request."""
        best, at, name = None, 0, names[:NAME_BYTES]
        for past in self.last(tenant):
            if not name:
                break  # nobody agrees further than the best so far
            if past.names.startswith(name, at):
                best, at = past, _agreed(past.names, names, at // NAME_BYTES + 1) * NAME_BYTES
                name = names[at : at + NAME_BYTES]
        return Nearest(best, at // NAME_BYTES)

    def _weigh(self, past: Past) -> None:
        size = len(past.names) + _PAST_BYTES
        self._bytes += size - past.size
        past.size = size

    def _bound(self) -> None:
        while self._bytes > self._max_bytes and self._of:
            tenant, kept = next(iter(self._of.items()))
            self._drop(kept)
            if not kept:
                del self._of[tenant]

    def _drop(self, kept: deque[Past]) -> None:
        past = kept.popleft()
        self._bytes -= past.size
        past.size = 0


def names_of(chunks: Iterable[Chunk]) -> bytes:
    """As `Past` has them."""
    return b"".join([chunk.key[:NAME_BYTES] for chunk in chunks])


def _agreed(one: bytes, other: bytes, least: int) -> int:
    """In how many chunks from the first two texts agree, which is `least` or more: a name covers all before it."""
    low, high = least, min(len(one), len(other)) // NAME_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * NAME_BYTES, middle * NAME_BYTES)
        low, high = (middle, high) if one[at] == other[at] else (low, middle - 1)
    return low
