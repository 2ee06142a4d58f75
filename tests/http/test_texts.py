"""Texts that no tokenizer takes are refused, wherever in a body they stand; all others pass."""

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.server_settings import ServerSettings
from hotspan.http import texts
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import Exchange
from hotspan.http.texts import check_characters, checked_characters
from hotspan.server.admission import Admission
from tests.server.asgi import call

HALF = "\ud800"
WHOLE = "\N{GRINNING FACE} \\ud800 \u00e9 \\\\"

STRINGS = st.text(st.characters(exclude_categories=[]), max_size=8)
VALUES = st.recursive(
    st.none() | st.integers(-9, 9) | STRINGS,
    lambda inner: st.lists(inner) | st.dictionaries(STRINGS, inner),
    max_leaves=8,
)


def is_whole(value: Any) -> bool:
    """Whether UTF-8 has all of its characters, once it was JSON: two halves side by side are a whole one."""
    try:
        json.dumps(json.loads(json.dumps(value)), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


@given(VALUES)
def test_exactly_half_pairs_are_refused(value: Any) -> None:
    """In keys and values, at any depth, also where a backslash is written before the letters of an escape."""
    body = json.dumps(value).encode()
    if is_whole(value):
        check_characters(body)
    else:
        with pytest.raises(HttpError) as refused:
            check_characters(body)
        assert refused.value.status == 400


@pytest.mark.parametrize(
    "body", [b"", b"{", b'"\\ud800', b'{"a": NaN, "b": "\\ud83d\\ude00"}', b"\\ud", b"[" * 100_000]
)
def test_what_is_no_json_is_left_to_others(body: bytes) -> None:
    """Whoever reads it says what is wrong with it."""
    check_characters(body)


@pytest.mark.parametrize("text", ["a long text \n", "\N{GRINNING FACE}", '\\ud800 \u00e9"', "\\\N{GRINNING FACE}"])
def test_a_large_body_is_not_parsed(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """It is looked through, in slices of 256 KiB at most, also with escapes; one with half a pair is refused so."""
    monkeypatch.setattr(texts, "json", None)
    body = json.dumps({"prompt": text * 100_000}).encode()
    assert sum(1 for _ in checked_characters(body)) >= len(body) // (1 << 18)
    with pytest.raises(HttpError):
        check_characters(body[:-2] + b'\\ud800"}')
    with pytest.raises(HttpError):
        check_characters(b'["\\udc00' + body[1:])
    check_characters(b"--boundary" + body[:-2] + b'\\ud800"}')


def test_a_scan_is_linear_in_the_body() -> None:
    """Each piece is looked at once: no part of the pattern gives back what it took."""
    for repeats in re.findall(r"\{1,\d+\}(.?)", texts._WHOLE.pattern.decode()):
        assert repeats == "+"


@pytest.mark.parametrize("name", ["prompt", "stop", "session_id", "messages", "cache_salt", "kv_transfer_params"])
@pytest.mark.parametrize("is_counted", [True, False])
def test_no_work_begins_with_one(name: str, is_counted: bool) -> None:
    """Whatever the route and the field: every body that reaches the engine's application passes here."""
    admission, begun = Admission(ServerSettings(), HttpLimits()), list[bytes]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        exchange = Exchange(scope, receive, send)

        async def work(body: bytes) -> None:
            begun.append(body)
            await exchange.respond(200, b"{}")

        run: Callable[..., Coroutine[Any, Any, None]] = admission.run
        try:
            await run(exchange, work, is_counted=is_counted)
        except HttpError as error:
            await exchange.fail(error)

    for text, status in ((HALF, 400), (WHOLE, 200)):
        body = {name: [{"content": text}]}
        assert call(app, "POST", "/v1/completions", body=body).status == status
    assert len(begun) == 1 and not admission.in_flight
