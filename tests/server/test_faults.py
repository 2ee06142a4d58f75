"""What a client is told of a fault inside the engine's app, and what stands in the log."""

import logging
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from hotspan.server.faults import name_faults


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineGenerateError("a secret"), 500),
        (EngineDeadError("a secret"), 500),
        (RuntimeError("a secret"), 500),
        (ValueError("too long"), 400),
        (NotImplementedError("not here"), 501),
    ],
)
async def test_a_fault_is_told_by_its_name_in_the_log(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A 500 names the request, whose cause is in the log; what a client did wrong it is told, as vLLM says it."""
    app = FastAPI()
    init_exception_handler(app)
    app.state.args = SimpleNamespace(log_error_stack=False)
    app.state.engine_client = SimpleNamespace(errored=True, is_running=False)
    app.state.server = SimpleNamespace(should_exit=False)

    async def broken() -> None:
        raise error

    app.add_api_route("/broken", broken)
    name_faults(app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://engine") as http:
        with caplog.at_level(logging.ERROR):
            answer = await http.get("/broken", headers={"x-request-id": "r-17"})
    message, logged = answer.json()["error"]["message"], "request=r-17" in caplog.text and "a secret" in caplog.text
    assert answer.status_code == status and answer.json()["error"]["code"] == status
    assert ("r-17" in message, "a secret" in message, logged) == (status == 500, False, status == 500)
    assert message if status == 500 else str(error) in message
    if isinstance(error, EngineDeadError):
        assert app.state.server.should_exit, "vLLM's handler ends the server of a dead engine"
