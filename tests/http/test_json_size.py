"""What a body of JSON holds is counted exactly, in slices, and however its strings look."""

import json
from collections.abc import Callable, Generator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.http import json_size, texts
from hotspan.http.errors import HttpError
from hotspan.http.json_size import JsonLimit, check_json, checked_json
from hotspan.http.texts import checked_characters

STRINGS = st.text(st.sampled_from('a"\\[{,:\u00e9\n'), max_size=9)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | STRINGS,
    lambda inner: st.lists(inner) | st.dictionaries(STRINGS, inner),
    max_leaves=20,
)


def held(value: Any) -> tuple[int, int, int]:
    """Commas, objects and lists, and fields, of a value as JSON."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    own = max(0, len(inner) - 1), int(isinstance(value, dict | list)), len(value) if isinstance(value, dict) else 0
    commas, containers, fields = map(sum, zip(own, *map(held, inner), strict=True))
    return commas, containers, fields


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
    """Whatever is in its strings and wherever slices end: one comma, object, list or field less is refused."""
    body = json.dumps(value, ensure_ascii=not is_plain).encode()
    commas, containers, fields = held(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_size, "SLICE_BYTES", size)
        values = 1 + commas + containers
        assert is_taken(body, JsonLimit(values, containers, fields))
        assert not is_taken(body, JsonLimit(values, containers - 1, fields))
        assert not is_taken(body, JsonLimit(values - 1, containers, fields))
        assert not is_taken(body, JsonLimit(values, containers, fields - 1))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_no_encoding_hides_what_a_body_holds(encoding: str) -> None:
    """A parser takes them all: UTF-8 is counted with a mark before it, and JSON in another encoding is refused."""
    for text, status in (('[{"a":1},{"a":1}]', 413), ('  [{"a":"\\"[1]"}]', 413), ('[["a"]]', None)):
        body = text.encode(encoding)
        assert json.loads(body)
        if status is None and encoding == "utf-8-sig":
            check_json(body, JsonLimit(containers=2))
            continue
        with pytest.raises(HttpError) as refused:
            check_json(body, JsonLimit(containers=1))
        assert refused.value.status == (413 if encoding == "utf-8-sig" else 400)


def test_what_is_no_json_is_not_counted() -> None:
    """Whatever bytes are in sound or in forms; white space without end is no way around it."""
    for body in (b"--boundary\r\n[[", b"", b"ID3\x00[[", b"\xff\xfb\x90[[", b'"[["', b"\x89PNG[["):
        check_json(body, JsonLimit(containers=1))
    with pytest.raises(HttpError):
        check_json(b" " * (json_size.SLICE_BYTES + 9) + b"[[]]", JsonLimit(containers=1))


@pytest.mark.parametrize("check", [checked_json, checked_characters])
@pytest.mark.parametrize("unit", [b"{[,", b'""', rb"\\", rb"\"", b" ", rb"\ud"[:3] + b" "])
def test_no_slice_is_long(check: Callable[[bytes], Generator[None]], unit: bytes) -> None:
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
