"""The index of windows: everything known is found at any offset, nothing else is, and memory is bounded."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.namespace import ChunkKeyer, tenant_digest
from hotspan.core.types import ChunkKey
from hotspan.engine.blend import index as index_module
from hotspan.engine.blend.index import MAX_FALSE, WindowIndex, rolling_hashes
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.windows import Tokens, as_tokens

WIDTH = 4
OWNER, OTHER = (ChunkKeyer(bytes(32), tenant=tenant_digest(name)) for name in ("one", "other"))
TEXTS = st.lists(st.integers(0, 3), max_size=40).map(as_tokens)
WINDOWS = st.lists(st.integers(0, 3), min_size=WIDTH, max_size=WIDTH).map(as_tokens)


def key(tokens: Tokens) -> ChunkKey:
    return OWNER.window_key(tokens.tobytes(), 0)


def made(max_windows: int = 100, max_owners: int = 10, width: int = WIDTH) -> WindowIndex:
    return WindowIndex(width, max_windows=max_windows, max_owners=max_owners, secret=b"seed")


@given(TEXTS, st.integers(1, 20), st.integers(0, 2**64 - 1))
@settings(max_examples=30)
def test_equal_texts_have_equal_hashes_at_any_offset(text: Tokens, width: int, secret: int) -> None:
    """A window's hash is that of its tokens alone, whatever the width, and differs where they do."""
    hashes = rolling_hashes(text, width, secret)
    assert len(hashes) == max(0, len(text) - width + 1)
    alone = [int(rolling_hashes(text[at : at + width], width, secret)[0]) for at in range(len(hashes))]
    assert hashes.tolist() == alone
    contents = [text[at : at + width].tobytes() for at in range(len(hashes))]
    assert len(set(alone)) == len(set(contents))


def test_hashes_depend_on_the_order_and_the_key() -> None:
    """Texts of two tokens that collide for every base of a polynomial modulo 2^64 (Thue-Morse) do not collide here."""
    ones = [bin(n).count("1") % 2 for n in range(2048)]
    text, inverse = as_tokens(ones), as_tokens([1 - one for one in ones])
    assert rolling_hashes(text, 2048, 1)[0] != rolling_hashes(inverse, 2048, 1)[0]
    assert rolling_hashes(text, 2048, 1)[0] != rolling_hashes(text, 2048, 2)[0]
    swapped = text[::-1].copy()
    swapped[0], swapped[1] = 7, 8
    assert rolling_hashes(text, 2048, 1)[0] != rolling_hashes(swapped, 2048, 1)[0]


@given(st.lists(WINDOWS, max_size=6), TEXTS, st.integers(0, 10), st.integers(0, 40))
def test_what_is_found_are_known_windows_that_cover_most(
    known: list[Tokens], text: Tokens, start: int, stop: int
) -> None:
    """Each find has its tokens in the text, inside the search; together they cover what all occurrences cover."""
    index = made()
    for position, window in enumerate(known):
        index.note(OWNER.owner, window, key(window), position)
    index.check()
    search = Run(min(start, stop), min(stop, len(text)))
    found = index.find(OWNER.owner, text, key, search)
    contents = {window.tobytes() for window in known}
    occurrences = [
        at for at in range(search.start, search.stop - WIDTH + 1) if text[at : at + WIDTH].tobytes() in contents
    ]
    starts = [each.run.start for each in found]
    assert starts == sorted(set(starts)) and set(starts) <= set(occurrences)
    assert all(each.window.key == key(text[each.run.start : each.run.stop]) for each in found)
    covered = {at + n for at in starts for n in range(WIDTH)}
    assert covered == {at + n for at in occurrences for n in range(WIDTH)}


def test_a_repeated_token_is_found_window_by_window() -> None:
    """In a text that matches at every offset, each token is in one window: work does not grow with the matches."""
    index, text = made(), as_tokens([7] * 40)
    index.note(OWNER.owner, text[:WIDTH], key(text[:WIDTH]), 0)
    assert [each.run.start for each in index.find(OWNER.owner, text, key)] == list(range(0, 40, WIDTH))


@given(WINDOWS)
def test_another_owner_finds_nothing(window: Tokens) -> None:
    """A window of one tenant is no candidate for another, not even a false one; nor does forgetting reach across."""
    index = made()
    index.note(OWNER.owner, window, key(window), 0)
    assert index.find(OTHER.owner, window, lambda tokens: OTHER.window_key(tokens.tobytes(), 0)) == []
    assert index.forget_owner(OTHER.owner) == 0 and index.false_candidates == 0
    assert len(index.find(OWNER.owner, window, key)) == 1
    assert index.forget_owner(OWNER.owner) == 1 and len(index) == 0
    index.check()


def test_a_hash_alone_is_no_match(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all texts have one hash, tokens decide; a prompt full of false candidates is given up soon."""
    monkeypatch.setattr(
        index_module,
        "rolling_hashes",
        lambda tokens, width, key: np.full(max(0, len(tokens) - width + 1), 5, np.uint64),
    )
    index, window = made(), as_tokens([1, 2, 3, 4])
    index.note(OWNER.owner, window, key(window), 0)
    text = as_tokens([9, 9, 1, 2, 3, 4, 9])
    assert [each.run for each in index.find(OWNER.owner, text, key)] == [Run(2, 6)]
    before = index.false_candidates
    assert index.find(OWNER.owner, as_tokens([9] * 1000), key) == []
    assert index.false_candidates - before == MAX_FALSE


def test_hashes_are_keyed_by_owner_and_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that collide for one tenant, or in another process, do not collide here."""
    keys = []
    hashes = index_module.rolling_hashes
    monkeypatch.setattr(
        index_module, "rolling_hashes", lambda tokens, width, key: keys.append(key) or hashes(tokens, width, key)
    )
    for secret in (b"seed", b"other", None, None):
        index = WindowIndex(WIDTH, secret=secret)
        for owner in (OWNER.owner, OTHER.owner):
            index.note(owner, as_tokens([1, 2, 3, 4]), ChunkKey(bytes(32)), 0)
    assert len(set(keys)) == len(keys) == 8


def test_what_is_noted_again_is_the_same_window() -> None:
    """A second sighting returns the first one, with its position, and takes no memory."""
    index, window = made(), as_tokens([1, 2, 3, 4])
    first = index.note(OWNER.owner, window, key(window), 8)
    assert index.note(OWNER.owner, window, key(window), 99) is first
    assert (first.position, len(index)) == (8, 1)


@given(st.lists(st.tuples(st.integers(0, 4), WINDOWS), max_size=30))
@settings(max_examples=30)
def test_memory_is_bounded(noted: list[tuple[int, Tokens]]) -> None:
    """Never more windows or owners than allowed, whoever comes in what order; what came last is known."""
    index = made(max_windows=8, max_owners=3)
    for owner, window in noted:
        index.note(bytes([owner]), window, key(window), 0)
        index.check()
        assert index.find(bytes([owner]), window, key)


def test_an_owner_with_few_windows_loses_none_to_one_with_many() -> None:
    """When the index is full, the largest owner gives way to itself."""
    index = made(max_windows=8)
    few, many = ([as_tokens([a, 9, 9, n]) for n in range(count)] for a, count in ((1, 2), (2, 100)))
    for window in [*few, *many]:
        index.note(bytes([int(window[0])]), window, key(window), 0)
    assert all(index.find(b"\x01", window, key) for window in few)
    assert [bool(index.find(b"\x02", window, key)) for window in many] == [n >= 94 for n in range(100)]
    index.check()


def test_discarded_windows_are_gone() -> None:
    """A window that no tier has any more is forgotten by its tokens."""
    index, window = made(), as_tokens([1, 2, 3, 4])
    index.note(OWNER.owner, window, key(window), 0)
    index.discard(OWNER.owner, window)
    assert index.find(OWNER.owner, window, key) == [] and len(index) == 0
    index.check()


def test_what_is_no_window_is_refused() -> None:
    """A text of another length can't be noted, nor hashed by zero tokens."""
    with pytest.raises(ValueError, match="4 tokens"):
        made().note(OWNER.owner, as_tokens([1]), ChunkKey(b""), 0)
    with pytest.raises(ValueError, match="at least one token"):
        rolling_hashes(as_tokens([1]), 0, 0)
