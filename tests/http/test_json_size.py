"""What a body of JSON holds is counted exactly, in slices, and however its strings look."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.http import json_size, texts
from hotspan.http.errors import HttpError
from hotspan.http.json_size import JsonLimit, check_json, checked_json
from hotspan.http.texts import checked_characters

STRINGS = st.text(st.sampled_from('a"\\[{,\u00e9\n'), max_size=9)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | STRINGS,
    lambda inner: st.lists(inner) | st.dictionaries(STRINGS, inner),
    max_leaves=20,
)


def held(value: Any) -> tuple[int, int]:
    """Commas, and objects and lists, of a value as JSON."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    commas, containers = max(0, len(inner) - 1), int(isinstance(value, dict | list))
    for each in inner:
        more_commas, more_containers = held(each)
        commas, containers = commas + more_commas, containers + more_containers
    return commas, containers


def is_taken(body: bytes, limit: JsonLimit) -> bool:
    try:
        check_json(body, limit)
    except HttpError as error:
        assert error.status == 413
        return False
    return True


@settings(max_examples=300, deadline=None)
@given(value=VALUES.map(lambda value: [value]), size=st.integers(1, 9), is_plain=st.booleans())
def test_a_body_is_taken_up_to_its_exact_limit(value: Any, size: int, is_plain: bool) -> None:
    """Whatever is in its strings and wherever slices end: one comma, object or list less is refused."""
    body = json.dumps(value, ensure_ascii=not is_plain).encode()
    commas, containers = held(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "SLICE_BYTES", size)
        assert is_taken(body, JsonLimit(1 + commas + containers, containers))
        assert not is_taken(body, JsonLimit(1 + commas + containers, containers - 1))
        assert not is_taken(body, JsonLimit(commas + containers, containers))


@pytest.mark.parametrize("check", [checked_json, checked_characters])
@pytest.mark.parametrize("unit", [b"{[,", b'""', rb"\\", rb"\"", b" ", rb"\ud"[:3] + b" "])
def test_no_slice_is_long(check: Callable[[bytes], Iterator[None]], unit: bytes) -> None:
    """A body of 4 MB is looked at in pieces of 64 KiB: the event loop does other work between them."""
    body = b'{"prompt":"' + unit * (4_000_000 // len(unit)) + b'"}'
    pauses = 0
    try:
        for _ in check(body):
            pauses += 1
    except HttpError as error:
        assert error.status == 413
        assert pauses
        return
    if check is checked_json or unit[:2] != rb"\u":  # what may hold half a pair is parsed, and then as a whole
        assert pauses >= len(body) // json_size.SLICE_BYTES - 1


def test_a_half_between_two_slices_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a slice ends."""
    monkeypatch.setattr(texts, "SLICE_BYTES", 5)
    for spaces in range(12):
        with pytest.raises(HttpError):
            texts.check_characters(b" " * spaces + rb'"\ud800"')
