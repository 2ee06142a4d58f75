"""Sections of prompts: text between separators, which replicas that blend reuse wherever it stands (docs/blending.md).

Their names do not depend on the text before them. A replica keeps the KV of a section from the second time on that it
computes it, so the index counts how often each was sent where.
"""

import re
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

MIN_BYTES = 1024
"""About 256 tokens, a window's: nothing is kept of a shorter section."""

_MAX_ENTRIES = 65_536
_MAX_CUTS = 16_384
"""Separators of one prompt that are looked at."""


class Section(NamedTuple):
    """Bytes [start, stop) of a prompt, and their name."""

    key: int
    start: int
    stop: int


class Known(NamedTuple):
    """Of one prompt at one replica. kept: bytes [start, stop) that it keeps. seen: those that it was sent once."""

    kept: Sequence[tuple[int, int]] = ()
    seen: Sequence[tuple[int, int]] = ()


NOTHING = Known()


def separator_pattern(separators: Iterable[str]) -> re.Pattern[bytes] | None:
    """Where any of these texts stands; None without any."""
    texts = sorted({text.encode() for text in separators if text}, key=len, reverse=True)
    return re.compile(b"|".join(map(re.escape, texts))) if texts else None


def sections_of(text: bytes, root: int, pattern: re.Pattern[bytes]) -> list[Section]:
    """The sections of a text that are long enough. root: of adapter and salt, as for its pieces."""
    found, start = list[Section](), 0
    cuts = (match.span() for match in islice(pattern.finditer(text), _MAX_CUTS))
    for begin, end in chain(cuts, ((len(text), len(text)),)):
        if begin - start >= MIN_BYTES:
            found.append(Section(xxh3_64_intdigest(text[start:begin], root), start, begin))
        start = end
    return found


class SectionIndex:
    """How often replicas were sent sections: once, or more often. The sections that were sent last; for one thread."""

    def __init__(self, max_entries: int = _MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._sections: OrderedDict[int, int] = OrderedDict()  # to two bits a replica: sent once, sent twice

    def __len__(self) -> int:
        return len(self._sections)

    def add(self, replica: int, sections: Iterable[Section]) -> None:
        """A replica was sent them."""
        once = 1 << 2 * replica
        for section in sections:
            sent = self._sections.get(section.key, 0)
            self._sections[section.key] = sent | (once << 1 if sent & once else once)
            self._sections.move_to_end(section.key)
        while len(self._sections) > self._max_entries:
            self._sections.popitem(last=False)

    def clear(self, replica: int) -> None:
        """A replica has nothing any more."""
        others = ~(3 << 2 * replica)
        self._sections = OrderedDict((key, sent & others) for key, sent in self._sections.items() if sent & others)

    def known(self, replica: int, sections: Iterable[Section]) -> Known:
        """What a replica knows of these sections."""
        once, kept, seen = 1 << 2 * replica, list[tuple[int, int]](), list[tuple[int, int]]()
        for section in sections:
            sent = self._sections.get(section.key, 0)
            if sent & once:
                (kept if sent & once << 1 else seen).append((section.start, section.stop))
        return Known(kept, seen)


def bytes_behind(spans: Sequence[tuple[int, int]], at: float) -> float:
    """How many bytes of spans are behind the first `at`."""
    return sum(max(0.0, stop - max(start, at)) for start, stop in spans)
