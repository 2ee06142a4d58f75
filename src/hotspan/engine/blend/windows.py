"""Windows: the pieces of a text that are kept by their content alone, and where they begin.

    tokens    [system prompt][sep][document .......................][sep][question]
    cuts      ^                   ^                                      ^
    windows                       [ W ][ W ][ W ]
                                          [ W ]    the last one ends with its section and overlaps the one before it

A cut begins a section: behind a chat turn's marker or a configured separator, which is itself computed afresh. Windows
never cross a cut, so that the same document gives the same windows in whatever prompt it stands.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hotspan.engine.blend.runs import Run

Tokens = npt.NDArray[np.uint32]


def as_tokens(ids: Sequence[int]) -> Tokens:
    """Token ids as an array. Raises: OverflowError or ValueError for what is no token id."""
    return np.asarray(ids, np.uint32)


def sections(tokens: Tokens, separators: Sequence[Sequence[int]]) -> list[Run]:
    """The text between separators, in order; none of them is empty, and separators belong to none.

    separators: texts as token ids. Occurrences that overlap are one separator.
    """
    is_separator = np.zeros(len(tokens), bool)
    for separator in separators:
        pattern = as_tokens(separator)
        for start in _occurrences(tokens, pattern):
            is_separator[start : start + len(pattern)] = True
    edges = np.flatnonzero(np.diff(np.concatenate(([True], is_separator, [True]))))
    return [Run(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def windows(section: Run, width: int) -> Iterator[Run]:
    """The windows of a section, `width` tokens each; none if it is shorter.

    They cover the section: the last one ends with it, and overlaps the one before if the section is no whole number.
    """
    yield from (Run(start, start + width) for start in range(section.start, section.stop - width + 1, width))
    if section.tokens > width and section.tokens % width:
        yield Run(section.stop - width, section.stop)


def _occurrences(tokens: Tokens, pattern: Tokens) -> Any:
    """Where a pattern begins, overlapping occurrences too."""
    last = len(tokens) - len(pattern)
    if not len(pattern) or last < 0:
        return np.empty(0, np.intp)
    found = np.flatnonzero(tokens[: last + 1] == pattern[0])
    for offset in range(1, len(pattern)):
        found = found[tokens[found + offset] == pattern[offset]]
    return found
