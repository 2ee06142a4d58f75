"""Pages of other origins, and what the access log leaves out."""

import logging

import pytest

from hotspan.core.errors import ConfigError
from hotspan.http.options import LeavesOut, with_cors

from .asgi import call
from .test_policy import OF_ACME, gate

PAGE = "https://page.example"
ASKS = {"origin": PAGE, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}


@pytest.mark.parametrize("values", [{"allowed_origins": f'["{PAGE}"]'}, {"allowed_origins": [PAGE, "https://b"]}])
def test_a_page_may_read_every_answer(values: dict[str, object]) -> None:
    """An origin that is allowed is answered with CORS headers, refusals included; another one without."""
    app = with_cors(gate(), values)
    for headers, status in (({}, 401), (OF_ACME, 200)):
        reply = call(app, "POST", "/v1/completions", {"origin": PAGE, **headers})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (status, PAGE)
        other = call(app, "POST", "/v1/completions", {"origin": "https://other.example", **headers})
        assert other.status == status and "access-control-allow-origin" not in other.headers


def test_the_question_before() -> None:
    """A preflight needs no key, and is answered by what the options allow."""
    app = with_cors(gate(), {"allowed_origins": ["*"], "allowed_methods": '["POST"]', "allowed_headers": ["x-a"]})
    assert call(app, "OPTIONS", "/v1/completions", ASKS).status == 400  # the header is not among the allowed
    allowed = with_cors(gate(), {"allowed_origins": ["*"]})
    reply = call(allowed, "OPTIONS", "/v1/completions", ASKS)
    assert reply.status == 200 and "POST" in reply.headers["access-control-allow-methods"]


def test_without_origins() -> None:
    """Without an origin nothing is added, and a list that is none is refused."""
    app = gate()
    assert with_cors(app, {"allowed_methods": ["GET"]}) is app
    with pytest.raises(ConfigError, match=r"--allowed-origins is .*: give a JSON list"):
        with_cors(app, {"allowed_origins": "https://page"})


def test_paths_outside_the_access_log() -> None:
    """Requests for named paths leave no line, whatever their query; all others do."""
    log = LeavesOut("/health, /metrics")
    for path, is_written in (("/health", False), ("/metrics?a=b", False), ("/healthy", True), ("/v1/models", True)):
        args = ("127.0.0.1:9", "GET", path, "1.1", 200)
        record = logging.LogRecord("uvicorn.access", logging.INFO, "", 0, '%s - "%s %s HTTP/%s" %d', args, None)
        assert log.filter(record) is is_written
