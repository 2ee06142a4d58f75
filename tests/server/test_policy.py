"""Who may call which route: a table with all of them, and a gate that nothing passes by."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.responses import StreamingResponse
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.routing import Mount

from docsite.reference import REFERENCE
from docsite.routes import http_page
from hotspan.config.tenants import Tenants
from hotspan.server.policy import (
    ADMIN,
    CLIENT,
    CLIENT_READS,
    METRICS,
    PUBLIC,
    Access,
    Gate,
    _held_s,
    access_table,
    unlisted,
)
from hotspan.server.principal import ANYBODY, Credentials, asking, current_held_since_s, current_tenant
from tests.server.conftest import environment_is_read

from .asgi import call
from .test_principal import ADMIN_TOKEN, known

OF_ACME, OF_ADMIN = {"authorization": "Bearer key-a"}, {"authorization": f"Bearer {ADMIN_TOKEN}"}
WRONG = {"authorization": "Bearer sk-somebody-elses"}


def fake_app(root_path: str = "") -> FastAPI:
    app = FastAPI(root_path=root_path)

    async def answer(request: Request) -> PlainTextResponse:
        return PlainTextResponse(current_tenant())

    for path in ("/health", "/v1/models", "/v1/completions", "/sleep", "/v1/responses/{response_id}", "/new/route"):
        app.add_api_route(path, answer, methods=["GET", "POST"], include_in_schema=False)

    async def metrics(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("metrics")(scope, receive, send)

    mount = Mount("/metrics", metrics)
    mount.path_regex = re.compile("^/metrics(?P<path>.*)$")  # as vLLM does
    app.router.routes.append(mount)

    @app.get("/v1/chat/completions")
    async def stream() -> StreamingResponse:
        def parts() -> Iterator[str]:
            for n in range(3):
                yield f"{current_tenant()}{n} "

        return StreamingResponse(parts())

    @app.websocket("/v1/realtime")
    async def realtime(socket: WebSocket) -> None:
        await socket.accept()
        await socket.close()

    return app


def gate(*, keyed: bool = True, has_given_token: bool = False, root_path: str = "") -> Gate:
    tenants = known(acme="key-a", globex="key-b") if keyed else Tenants()
    table = access_table(has_keys=keyed, has_given_token=has_given_token)
    return Gate(fake_app(root_path), table, Credentials(tenants, ADMIN_TOKEN))


@pytest.mark.parametrize(
    ("path", "nobody", "wrong", "client", "admin"),
    [
        ("/health", 200, 200, 200, 200),
        ("/v1/completions", 401, 401, 200, 200),
        ("/v1/models", 401, 401, 200, 200),
        ("/v1/responses/resp_1", 401, 401, 200, 200),
        ("/sleep", 401, 401, 403, 200),
        ("/metrics", 401, 401, 403, 200),
        ("/metrics/", 401, 401, 403, 200),
        ("/new/route", 401, 401, 403, 200),
        ("/nothing", 404, 404, 404, 404),
        ("/openapi.json", 401, 401, 200, 200),
        ("//v1/completions", 404, 404, 404, 404),
        ("/v1/completions/", 404, 404, 404, 404),
        ("/health/../sleep", 404, 404, 404, 404),
    ],
)
def test_with_keys(path: str, nobody: int, wrong: int, client: int, admin: int) -> None:
    """Public, client and admin routes, one that no table names, and what is no route, whoever asks."""
    app = gate()
    assert [call(app, "GET", path, who).status for who in ({}, WRONG, OF_ACME, OF_ADMIN)] == [
        nobody,
        wrong,
        client,
        admin,
    ]


@pytest.mark.parametrize(
    ("path", "nobody", "admin"),
    [
        ("/health", 200, 200),
        ("/v1/completions", 200, 200),
        ("/v1/responses/resp_1", 200, 200),
        ("/metrics", 200, 200),
        ("/sleep", 401, 200),
        ("/new/route", 401, 200),
        ("/nothing", 404, 404),
    ],
)
def test_without_keys(path: str, nobody: int, admin: int) -> None:
    """Clients come without a key or with any placeholder; what administers still takes the token."""
    app = gate(keyed=False)
    assert [call(app, "GET", path, who).status for who in ({}, WRONG, OF_ADMIN)] == [nobody, nobody, admin]


def test_metrics_are_the_operators_choice() -> None:
    """A token that the operator gave closes /metrics; one that the server made for itself does not."""
    assert call(gate(keyed=False), "GET", "/metrics").status == 200
    assert call(gate(keyed=False, has_given_token=True), "GET", "/metrics").status == 401
    assert call(gate(keyed=False, has_given_token=True), "GET", "/metrics", OF_ADMIN).status == 200


def test_refusals_speak_openais_language() -> None:
    """A refusal is an OpenAI error that says what to do, asks for Bearer, and never repeats what was shown."""
    reply = call(gate(), "POST", "/v1/completions", WRONG, {"prompt": "x"})
    assert reply.headers["www-authenticate"].startswith("Bearer")
    assert set(reply.json["error"]) == {"message", "type", "param", "code"}
    assert (
        reply.json["error"]["code"] == "invalid_api_key" and "Authorization: Bearer" in reply.json["error"]["message"]
    )
    assert "somebody" not in reply.body.decode()
    forbidden = call(gate(), "POST", "/sleep", OF_ACME)
    assert "www-authenticate" not in forbidden.headers and "admin token" in forbidden.json["error"]["message"]


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "BREW"])
def test_no_method_passes_by(method: str) -> None:
    """A method that the route does not have is refused like the route itself."""
    assert call(gate(), method, "/sleep").status == 401
    assert call(gate(), method, "/v1/completions").status == 401
    assert call(gate(), method, "/v1/completions", OF_ACME).status == 405


def test_preflight() -> None:
    """A browser's question comes without a key and reaches the app, which has no handler for it but CORS."""
    asked = {"origin": "http://page", "access-control-request-method": "POST"}
    assert call(gate(), "OPTIONS", "/v1/completions", asked).status == 405
    assert call(gate(), "OPTIONS", "/v1/completions", {"origin": "http://page"}).status == 401


def test_the_app_hears_whose_it_is() -> None:
    """The tenant reaches the handler and a stream's generator."""
    assert call(gate(), "POST", "/v1/completions", OF_ACME).body == b"acme"
    assert call(gate(), "POST", "/v1/completions", {"x-api-key": "key-b"}).body == b"globex"
    assert call(gate(), "POST", "/v1/completions", OF_ADMIN).body == b"default"
    assert call(gate(keyed=False), "POST", "/v1/completions").body == b"default"
    assert call(gate(), "GET", "/v1/chat/completions", OF_ACME).body == b"acme0 acme1 acme2 "


@pytest.mark.parametrize(
    ("said", "held_s"),
    [([], 0.0), (["250"], 0.25), (["1", "2000"], 2.0), (["-5", "x", "1e9", "9" * 16], 0.0)],
)
def test_the_app_hears_for_how_long_a_request_was_held(said: list[str], held_s: float) -> None:
    """What routers say of it counts, the longest; what is no number of milliseconds does not."""
    headers = Headers(raw=[(b"x-hotspan-held-ms", value.encode()) for value in said])
    assert _held_s(headers) == held_s
    with asking(ANYBODY, held_s):
        assert current_held_since_s() is not None
    assert current_held_since_s() is None


def test_websockets() -> None:
    """A websocket opens with a key and is closed before it opens without one."""
    assert call(gate(), "GET", "/v1/realtime", OF_ACME, kind="websocket").status == 101
    assert call(gate(), "GET", "/v1/realtime", kind="websocket").status == 403
    assert call(gate(), "GET", "/v1/realtime", WRONG, kind="websocket").status == 403


@pytest.mark.parametrize("path", ["/base/sleep", "/sleep"])
def test_root_path(path: str) -> None:
    """Behind a prefix, what is checked is still the route that answers."""
    app = gate(root_path="/base")
    assert call(app, "GET", path, OF_ACME).status == 403
    assert call(app, "GET", path, OF_ADMIN).status == 200
    assert call(app, "GET", path.replace("sleep", "v1/models"), OF_ACME).status == 200


def test_each_route_stands_once() -> None:
    """No path is in two lists, so that none is decided by the order of lines."""
    paths = [*PUBLIC, *CLIENT, *ADMIN, *CLIENT_READS, METRICS]
    assert len(paths) == len(set(paths))
    assert set(access_table(has_keys=True, has_given_token=False)) == set(paths)


@pytest.fixture(scope="module")
def real_app(tiny_model: Path) -> Any:
    """vLLM's app with every route that it can have: all tasks, development mode, runtime adapters, fault tolerance."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.tasks import GENERATION_TASKS, POOLING_TASKS

    from hotspan.engine.arguments import parse_engine_arguments
    from hotspan.engine.entrypoints import build_app

    with environment_is_read(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        profiler = '{"profiler": "torch", "torch_profiler_dir": "/tmp"}'
        arguments = parse_engine_arguments(
            str(tiny_model), ["--enable-tokenizer-info-endpoint", "--profiler-config", profiler]
        )
        arguments.enable_fault_tolerance = True
        model = AsyncEngineArgs.from_cli_args(arguments).create_model_config()
        return build_app(arguments, (*GENERATION_TASKS, "render", *POOLING_TASKS), model)


def test_every_route_of_the_engine_has_a_policy(real_app: Starlette) -> None:
    """A route that a new vLLM brings fails here, until somebody has decided who may call it."""
    assert len(real_app.routes) > 60
    assert unlisted(real_app.routes, access_table(has_keys=True, has_given_token=True)) == []


def test_what_runs_code_or_ends_others_work_is_the_administrators(real_app: Starlette) -> None:
    """The routes by which servers were taken over or stopped are there, and no key reaches them."""
    paths = {getattr(route, "path", "") for route in real_app.routes}
    table = access_table(has_keys=False, has_given_token=False)
    for path in ("/collective_rpc", "/sleep", "/v1/load_lora_adapter", "/adapters", "/update_weights", "/pause"):
        assert path in paths and table[path] is Access.ADMIN


def test_reference_of_routes_is_that_of_the_code() -> None:
    """docs/reference/http.md is what `make reference` writes."""
    assert (REFERENCE / "http.md").read_text() == http_page()
