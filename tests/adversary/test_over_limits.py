"""One more than a limit takes is refused as the client's error, at once, and others are answered."""

import json
from typing import Any

import pytest

from hotspan.http.paths import MAX_SMALL_BYTES

from .conftest import House
from .test_limits import answered, completion, post

pytestmark = pytest.mark.engine

REFUSED = (400, 413, 422)
DOCUMENTS, TEMPLATE = [{"text": "a"}], "{document}"
OVER: dict[str, tuple[str, dict[str, Any]]] = {
    "items of a batch": ("/hotspan/cache/invalidate", {"batch": [{"tags": ["a"]}] * 1001}),
    "tokens of an invalidation": ("/hotspan/cache/invalidate", {"tokens": [1] * ((1 << 20) + 1)}),
    "id of a token": ("/hotspan/cache/invalidate", {"tokens": [2**31]}),
    "time of an announcement": ("/hotspan/cache/prefetch", {"prompt": "a", "hold_s": 600.1}),
    "tags of an announcement": ("/hotspan/cache/prefetch", {"tags": ["a"] * 65}),
    "time of a pin": ("/hotspan/cache/pin", {"tags": ["a"], "gib": 0.001, "hold_s": 30 * 86400.0 + 1}),
    "tags of a pin": ("/hotspan/cache/pin", {"tags": ["a"] * 65, "gib": 0.001}),
    "texts of a warm-up": ("/hotspan/cache/warm", {"texts": DOCUMENTS * 1001, "template": TEMPLATE}),
    "template of a warm-up": ("/hotspan/cache/warm", {"texts": DOCUMENTS, "template": "x" * 65536 + "{document}"}),
    "characters of warm-ups": ("/hotspan/cache/warm", {"texts": [{"text": "a" * 70_000}] * 1000, "template": TEMPLATE}),
    "name of a text": ("/hotspan/cache/warm", {"texts": [{"prompt": "a", "name": "n" * 513}]}),
    "body of an adapter": ("/adapters", {"name": "a", "src": "s" * 65_536}),
    "salt of an announcement": ("/hotspan/cache/prefetch", {"prompt": "a", "cache_salt": "s" * 4097}),
}


@pytest.mark.parametrize("name", OVER)
def test_one_more_than_a_limit_is_refused(well: House, name: str) -> None:
    """Of what hotspan's own routes take, by the server."""
    path, said = OVER[name]
    assert post(well, "server", "globex", path, json.dumps(said).encode()) in REFUSED
    assert answered(well, "server")


@pytest.mark.parametrize("entry", ["server", "router"])
def test_values_and_lists_of_a_body_are_counted(well: House, entry: str) -> None:
    """More than a million values, or 65,536 lists, are a 413 of the server, also through the router."""
    for more in ({"stop": [0] * ((1 << 20) + 1)}, {"stop": [[]] * ((1 << 16) + 1)}):
        assert post(well, entry, "globex", "/v1/completions", completion(well, **more)) == 413
    assert answered(well, entry)


@pytest.mark.parametrize("entry", ["server", "router"])
def test_a_body_has_a_size(well: House, entry: str) -> None:
    """A body of more than 64 MiB is a 413 by its head, or its connection ends."""
    assert post(well, entry, "globex", "/v1/completions", b"{" + b" " * (64 << 20) + b"}") in (0, 413)
    assert answered(well, entry)


@pytest.mark.parametrize("entry", ["server", "router"])
@pytest.mark.parametrize("path", ["/v1/models", "/hotspan/cache/pin", "/adapters", "/v1/responses/a/cancel"])
def test_a_small_request_has_a_small_body(well: House, entry: str, path: str) -> None:
    """What names are enough for takes 256 KiB; of more nothing is read."""
    body = json.dumps({"tags": ["a"], "name": "n" * MAX_SMALL_BYTES}).encode()
    assert post(well, entry, "globex", path, body) in (0, 413)
    assert answered(well, entry)


def test_a_long_name_of_a_session_is_refused(well: House) -> None:
    """A session's id of more than 256 characters is the client's error, and made-up sessions leave others' alone."""
    body = completion(well, kv_transfer_params={"session": "s" * 100_000})
    assert post(well, "server", "globex", "/v1/completions", body) in REFUSED
    assert answered(well, "server")
