"""What a directory may hold after a kill: kept by the parent from what its children told, and inherited by each child.

child: "store 5 v3"  -> may be there from now on        "stored 5 v3"  -> has to be there
       "discard 5"   -> need not be there               "forget #7 {5 v3, 6 v1}", then "forgotten #7" -> must not be
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hotspan.core.types import Chunk
from hotspan.testing.chunks import chain, content
from kit.simulated.faults import BadPlace

Stored = tuple[int, int]
"""One store: the chunk's number, and its version."""

Message = list[Any]
"""A verb and what it is about, of JSON types. A child tells before it acts, and again when it was acknowledged."""


@dataclass(slots=True)
class Book:
    """One directory's.

    payload_bytes: of a chunk. is_sealed, is_small: encrypted; too small for all chunks, so that some are evicted.
    is_packed: compressed, in several slots each. bad: places of its slab that fail for good.
    labels:  of every store that was not forgotten, whether or not anything may have come of it.
    acknowledged: when stores were reported that nothing may have taken away since.
    pending: stores that an invalidation takes that is not acknowledged. dead: that one took that is.
    cut:     chunks that were in slots which the next opening gave away.
    """

    payload_bytes: int
    is_sealed: bool
    is_small: bool
    is_packed: bool
    bad: tuple[BadPlace, ...] = ()
    chunks: list[Chunk] = field(default_factory=lambda: [chunk for n in range(24) for chunk in chain(f"text-{n}", 4)])
    versions: Counter[int] = field(default_factory=Counter)
    born: dict[Stored, frozenset[int]] = field(default_factory=dict)
    labels: dict[Stored, frozenset[int]] = field(default_factory=dict)
    acknowledged: dict[Stored, float] = field(default_factory=dict)
    pending: dict[int, list[Stored]] = field(default_factory=dict)
    dead: set[Stored] = field(default_factory=set)
    here: dict[int, int] = field(default_factory=dict)
    cut: set[int] = field(default_factory=set)

    def content(self, stored: Stored) -> bytes:
        """The bytes of one store."""
        return content(self.chunks[stored[0]].key, self.payload_bytes, stored[1])

    @property
    def may_lose(self) -> bool:
        """Whether a chunk may go that was stored: it is evicted, or lies in a place that can't be read."""
        return self.is_small or bool(self.bad)

    def versions_of(self, number: int) -> list[int]:
        """All versions of a chunk that ever were, newest first."""
        return list(range(self.versions[number], 0, -1))

    def note(self, message: Message) -> None:
        """Keep the books up with what a child told."""
        match message:
            case ["cut", numbers]:
                self.cut = set(numbers)
            case ["store", number, version, labels]:
                self.versions[number] = version
                self.born[number, version] = self.labels[number, version] = frozenset(labels)
                self.here[number] = version
            case ["stored", number, version, at_s]:
                self.acknowledged[number, version] = at_s
            case ["join", number, label]:
                stored = (number, self.here[number])
                self.labels[stored] |= {label}
            case ["discard", numbers]:
                for number in numbers:
                    self.acknowledged.pop((number, self.here.pop(number)), None)
            case ["forget", operation, taken]:
                self.pending[operation] = [(number, version) for number, version in taken]
                for stored in self.pending[operation]:
                    self.acknowledged.pop(stored, None)
                    if self.here.get(stored[0]) == stored[1]:
                        del self.here[stored[0]]
            case ["forgotten", operation]:
                for stored in self.pending.pop(operation):
                    self.labels.pop(stored, None)
                    self.born.pop(stored, None)
                    self.dead.add(stored)

    def reopened(self, seen: list[tuple[int, int, list[int]]]) -> None:
        """A child opened the directory, and found these (chunk, version, labels).

        A join that was not yet written when the process was killed is lost, as is the hit that it came from.
        """
        self.pending.clear()
        self.cut.clear()
        self.labels = dict(self.born)
        self.here = {}
        for number, version, labels in seen:
            self.here[number] = version
            if (number, version) in self.born:
                self.labels[number, version] = frozenset(labels)
