"""The text generator: repeatable, of the right length, varied."""

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.bench.prose import prose


def test_same_text_on_every_machine() -> None:
    """A seed's text never changes: benchmarks of different versions must read the same documents."""
    assert f"{zlib.crc32(prose(7, 5000).encode()):08x}" == "08cf3457"


@settings(deadline=None)
@given(seed=st.integers(), words=st.integers(0, 400))
def test_exact_length(seed: int, words: int) -> None:
    """Text has exactly the words asked for, and ends like a sentence."""
    text = prose(seed, words)
    assert len(text.split()) == words
    assert text == "" or text[-1] in '.?"'


@settings(deadline=None)
@given(seed=st.integers(), words=st.integers(1, 200), more=st.integers(0, 200))
def test_longer_text_continues_the_shorter(seed: int, words: int, more: int) -> None:
    """Two lengths of one seed share all words but the last of the shorter."""
    assert prose(seed, words + more).split()[: words - 1] == prose(seed, words).split()[: words - 1]


def test_varied() -> None:
    """Long text is not repetitive: many words, no sentence often, and deflate can't shrink it below a fifth."""
    text = prose(1, 50_000)
    sentences = text.split(". ")
    assert len(set(text.split())) > 3000
    assert len(set(sentences)) > 0.95 * len(sentences)
    assert len(zlib.compress(text.encode(), 9)) > len(text) / 5


def test_seeds_differ_from_the_start() -> None:
    """Documents of different seeds share no long prefix, so that a prefix cache can't mistake them for one."""
    assert len({prose(seed, 12) for seed in range(500)}) == 500


def test_negative_length() -> None:
    """A negative length is the caller's mistake."""
    with pytest.raises(ValueError, match="-1"):
        prose(1, -1)
