"""The routes over an engine that answers as vLLM does: what is asked of it, and what the client gets."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.responses import Response

from hotspan.core.errors import FormatterError
from hotspan.http.errors import HttpError
from hotspan.http.paths import OPENAI, WORK
from hotspan.server.front import Front
from hotspan.server.lmi.request import chosen_schema
from hotspan.server.principal import Principal, asking, current_tenant
from tests.bench.simulated import in_simulated_time

from .fake_engine import FakeEngine, Step
from .serving import client, front, invoke, rows, split, sse

ADAPTER = "X-Amzn-SageMaker-Adapter-Identifier"


class FakeAdapters:
    """Knows one adapter by two names."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def key_of(self, name: str, owner: str) -> str:
        return name

    async def resolve(self, name: str) -> str:
        if name not in self.names:
            raise HttpError(404, f"there is no adapter {name!r}", param="model")
        return f"{name}@0123"


def shouted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key.upper(): shouted(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shouted(item) for item in value]
    return value.upper() if isinstance(value, str) else value


class FakeFormatters:
    """Shouts; fails when told to, on the so many-th chunk."""

    def __init__(self, *, has_input: bool = False, has_output: bool = False, fails_at: int | None = None) -> None:
        self._has_input, self._has_output, self._fails_at = has_input, has_output, fails_at
        self.calls = 0
        self.asked: list[tuple[str | None, dict[str, str], str]] = []

    @property
    def is_empty(self) -> bool:
        return not (self._has_input or self._has_output)

    def has_input(self, adapter: str | None) -> bool:
        return self._has_input

    def has_output(self, adapter: str | None) -> bool:
        return self._has_output

    async def input(
        self, adapter: str | None, payload: dict[str, Any], headers: Mapping[str, str], owner: str | None
    ) -> dict[str, Any]:
        self.asked.append((adapter, dict(headers), owner))
        if "question" not in payload:
            raise FormatterError("model.py:ask: no question", phase="input", name="model.py:ask", status=400)
        return {"inputs": payload["question"].upper(), "model": "sneaky"}

    async def output(self, adapter: str | None, output: Any, headers: Mapping[str, str], owner: str) -> Any:
        assert len(headers["x-request-id"]) == 32
        if self.calls == self._fails_at:
            raise FormatterError("model.py:shout: KeyError 'x'", phase="output", name="model.py:shout")
        self.calls += 1
        return shouted(output) | {"by": adapter}


# -- schemas -----------------------------------------------------------------------------------------------------------


async def test_lmi() -> None:
    """LMI's schema in, LMI's schema out, on each of its routes."""
    engine = FakeEngine()
    app = front(engine)
    for path in ("/invocations", "/predictions/model", "/models/lmi/invoke"):
        answer = await invoke(app, {"inputs": "Say", "parameters": {"max_new_tokens": 3}}, path)
        assert (answer.status_code, answer.json()) == (200, {"generated_text": "Hello wide world"})
        assert engine.seen[-1][0] == "/v1/completions" and engine.body == {"prompt": "Say", "max_tokens": 3}


@pytest.mark.parametrize("path", sorted({*WORK} - {*OPENAI}))
async def test_no_route_answers_with_the_base_model_for_an_adapter(path: str) -> None:
    """Where the header can't choose the model it is refused, and the engine is not asked."""
    engine = FakeEngine()
    app = front(engine, plugs={"adapters": FakeAdapters("legal")})
    refused = await invoke(app, {"messages": []}, path, **{ADAPTER: "legal"})
    assert refused.status_code == 400 and "takes no adapter" in refused.text and not engine.seen


async def test_lmi_stream() -> None:
    """A row for every token, several of one step included; the last has the text and the details."""
    answer = await invoke(front(FakeEngine()), {"inputs": "Say", "stream": True, "parameters": {"details": True}})
    assert answer.headers["content-type"] == "application/jsonlines"
    made = rows(answer)
    assert [row["token"] for row in made] == [
        {"id": 5, "text": "Hello", "log_prob": -0.5, "logprob": -0.5},
        {"id": 6, "text": " wide", "log_prob": -0.6, "logprob": -0.6},
        {"id": 7, "text": " world", "log_prob": -0.7, "logprob": -0.7},
        {"id": 2, "text": "", "log_prob": -0.2, "logprob": -0.2},
    ]
    assert {row["generated_text"] for row in made[:-1]} == {None}
    assert made[-1]["generated_text"] == "Hello wide world"
    assert made[-1]["details"] == {"finish_reason": "eos_token", "seed": None, "generated_tokens": 4, "input_length": 2}


async def test_lmi_stream_as_events() -> None:
    """A client that accepts events gets the same rows as events."""
    body = {"inputs": "Say", "stream": True}
    app = front(FakeEngine())
    answer = await invoke(app, body, Accept="text/event-stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    *told, done = sse(answer)
    assert done == "[DONE]" and [json.loads(event) for event in told] == rows(await invoke(app, body))


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"prompt": "Say", "inputs": "no"}, "/v1/completions"),
        ({"messages": [], "requestType": "NEW_SESSION"}, "/v1/chat/completions"),
        ({"input": "Say"}, "/invocations"),
        ({"query": "a", "documents": ["b"]}, "/invocations"),
    ],
)
async def test_schema_by_key(body: Any, path: str) -> None:
    """The first key in the page's order says what a body is; pooling goes to the engine's own route."""
    engine = FakeEngine()
    assert (await invoke(front(engine), body)).status_code == 200
    assert engine.seen[-1][:2] == (path, body)


async def test_openai_streams_are_events() -> None:
    """An OpenAI body on /invocations streams what a stock OpenAI client reads."""
    answer = await invoke(front(FakeEngine()), {"messages": [{"role": "user"}], "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *told, done = sse(answer)
    texts = [json.loads(event)["choices"][0]["delta"]["content"] for event in told]
    assert done == "[DONE]" and texts == ["Hello", " wide world", ""]


async def test_embeddings() -> None:
    """`inputs` of an embedding model: a vector for a text, a list for a list, in its order; else it is LMI's."""
    engine = FakeEngine()
    app = front(engine, plugs={"is_embedding": True})
    assert (await invoke(app, {"inputs": "abc"})).json() == [0.0, 3]
    assert (await invoke(app, {"inputs": ["abc", "de"]})).json() == [[0.0, 3], [1.0, 2]]
    assert engine.seen[-1][0] == "/v1/embeddings"


def test_no_schema() -> None:
    """A body that says nothing is told what would."""
    with pytest.raises(HttpError, match="prompt, inputs, messages, requestType"):
        chosen_schema({"text": "a"}, is_embedding=False)


@pytest.mark.parametrize(
    ("content", "kind", "status", "hint"),
    [
        (b"{", "application/json", 400, "no JSON"),
        (b"[" * 60_000, "application/json", 400, "no JSON"),
        (b"[" * 100_000, "application/json", 413, "objects and lists"),
        (b"\xff\xfe", "application/json", 400, "no JSON"),
        (b"[1]", "application/json", 400, "send an object"),
        (b"a=b", "application/x-www-form-urlencoded", 415, "send application/json"),
        (b'{"inputs": "Say", "requestType": 1, "adapters": ["a", "b"]}', "application/json", 400, "one adapter"),
        (b'{"requestType": "OPEN"}', "application/json", 400, "NEW_SESSION"),
    ],
)
async def test_bodies_that_are_none(content: bytes, kind: str, status: int, hint: str) -> None:
    """What is no request is an error of the one shape, and never reaches the engine."""
    engine = FakeEngine()
    async with client(front(engine)) as http:
        answer = await http.post("/invocations", content=content, headers={"content-type": kind})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == status and hint in error["message"] and not engine.seen
    assert set(error) == {"message", "type", "param", "code"}


async def test_a_model_that_is_not_there() -> None:
    """A path that names another model is a 404 that says what it is called."""
    answer = await invoke(front(FakeEngine(), plugs={"names": ["llama"]}), {"inputs": "Say"}, "/predictions/gpt")
    assert answer.status_code == 404 and "llama" in answer.json()["error"]["message"]


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "headers", "model"),
    [
        ({}, {}, None),
        ({"model": "lmi"}, {}, None),
        ({"model": "a"}, {}, "a@0123"),
        ({"adapters": "a"}, {}, "a@0123"),
        ({"adapters": ["b"], "model": "a"}, {}, "b@0123"),
        ({"adapters": "", "model": "a"}, {}, None),
        ({"adapters": "a"}, {ADAPTER: "b"}, "b@0123"),
        ({"model": "lmi"}, {ADAPTER.lower(): "a"}, "a@0123"),
        ({}, {ADAPTER.upper(): "a"}, "a@0123"),
    ],
)
@pytest.mark.parametrize("path", ["/invocations", "/predictions/lmi", "/v1/completions"])
async def test_adapter_selection(body: Any, headers: dict[str, str], model: str | None, path: str) -> None:
    """Header in any case, then `adapters`, then `model`; an empty one is the base model; on each route alike."""
    engine = FakeEngine()
    app = front(engine, plugs={"adapters": FakeAdapters("a", "b")})
    asked = {"prompt": "Say"} if path.startswith("/v1") else {"inputs": "Say"}
    async with client(app) as http:
        assert (await http.post(path, json=asked | body, headers=headers)).status_code == 200
    assert engine.body.get("model") == model and "adapters" not in engine.body


@pytest.mark.parametrize(("given", "model"), [({"model": "model"}, "lmi"), ({}, "lmi"), ({"model": "a"}, "a@0123")])
async def test_messages_always_name_a_model(given: dict[str, str], model: str) -> None:
    """vLLM refuses /v1/messages without a model, so that the base model is named there."""
    engine = FakeEngine()
    async with client(front(engine, plugs={"adapters": FakeAdapters("a")})) as http:
        body = {"messages": [{"role": "user", "content": "Say"}], "max_tokens": 2}
        assert (await http.post("/v1/messages", json=body | given)).status_code == 200
    assert engine.body["model"] == model


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions"])
async def test_an_unknown_adapter_is_never_the_base_model(path: str) -> None:
    """A name that nobody knows is a 404, wherever it was given, and the engine hears nothing."""
    engine = FakeEngine()
    app = front(engine, plugs={"adapters": FakeAdapters()})
    for body, headers in (({"model": "x"}, {}), ({"adapters": "x"}, {}), ({}, {ADAPTER: "x"})):
        async with client(app) as http:
            answer = await http.post(path, json={"messages": []} | body, headers=headers)
        assert answer.status_code == 404 and "no adapter 'x'" in answer.json()["error"]["message"]
    assert not engine.seen


async def test_without_adapters_the_engine_judges() -> None:
    """A server without a registry hands the name on: the engine knows its own adapters."""
    engine = FakeEngine()
    async with client(front(engine)) as http:
        await http.post("/v1/completions", json={"prompt": "Say"}, headers={ADAPTER: "x"})
    assert engine.body == {"prompt": "Say", "model": "x"}


# -- formatters --------------------------------------------------------------------------------------------------------


async def test_input_formatter() -> None:
    """It runs after the adapter was chosen and before the schema is, and can't choose another adapter."""
    engine, formatters = FakeEngine(), FakeFormatters(has_input=True)
    app = front(engine, plugs={"adapters": FakeAdapters("a"), "formatters": formatters})
    assert (await invoke(app, {"question": "why", "adapters": "a"}, X_Custom="1")).status_code == 200
    assert engine.body == {"prompt": "WHY", "max_tokens": 30, "model": "a@0123"}
    (adapter, headers, owner), *_ = formatters.asked
    assert adapter == "a" and headers["x-custom"] == "1" and owner == current_tenant()
    await invoke(app, {"question": "why"})
    assert engine.body == {"prompt": "WHY", "max_tokens": 30}


async def test_input_formatter_fails() -> None:
    """Its error has its own status and names it."""
    answer = await invoke(front(FakeEngine(), plugs={"formatters": FakeFormatters(has_input=True)}), {"inputs": "Say"})
    error = answer.json()["error"]
    assert answer.status_code == error["code"] == 400
    assert error["type"] == "FormatterError" and "model.py:ask" in error["message"]


async def test_output_formatter() -> None:
    """It has the last word over a whole answer, LMI's and OpenAI's."""
    app = front(FakeEngine(), plugs={"formatters": FakeFormatters(has_output=True)})
    assert (await invoke(app, {"inputs": "Say"})).json() == {"GENERATED_TEXT": "HELLO WIDE WORLD", "by": None}
    assert (await invoke(app, {"messages": []}, "/v1/chat/completions")).json()["OBJECT"] == "CHAT.COMPLETION"


async def test_output_formatter_of_a_stream() -> None:
    """It sees each chunk, and the frame around it stays what it was."""
    app = front(FakeEngine(), plugs={"formatters": FakeFormatters(has_output=True)})
    made = rows(await invoke(app, {"inputs": "Say", "stream": True}))
    assert [row["TOKEN"]["TEXT"] for row in made] == ["HELLO", " WIDE", " WORLD", ""]
    *told, done = sse(await invoke(app, {"prompt": "Say", "stream": True}, "/v1/completions"))
    assert done == "[DONE]" and [json.loads(event)["CHOICES"][0]["TEXT"] for event in told] == [
        "HELLO",
        " WIDE WORLD",
        "",
    ]


@pytest.mark.parametrize(
    ("made", "kind", "content"),
    [
        ("bare", "text/plain; charset=utf-8", b"bare"),
        ('{"a": 1}', "application/json", b'{"a": 1}'),
        (b"\x00", "application/octet-stream", b"\x00"),
    ],
)
async def test_output_of_another_kind(made: Any, kind: str, content: bytes) -> None:
    """What a formatter makes goes out as what it is."""

    class Bare(FakeFormatters):
        async def output(self, adapter: str | None, output: Any, headers: Mapping[str, str], owner: str) -> Any:
            return made

    answer = await invoke(front(FakeEngine(), plugs={"formatters": Bare(has_output=True)}), {"inputs": "Say"})
    assert (answer.headers["content-type"], answer.content) == (kind, content)


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@in_simulated_time
async def test_output_formatter_fails_in_a_stream(path: str) -> None:
    """The stream ends at once with the error as its last event, and the engine is told to stop."""
    engine = FakeEngine((*[Step(((1, "a"),), "a")] * 1000, Step((), "", "length")), delay_s=0.001)
    app = front(engine, plugs={"formatters": FakeFormatters(has_output=True, fails_at=2)})
    is_lmi = path == "/invocations"
    now = asyncio.get_running_loop().time
    began_s = now()
    answer = await invoke(app, {"inputs" if is_lmi else "prompt": "Say", "stream": True}, path)
    told = rows(answer) if is_lmi else [json.loads(event) for event in sse(answer)[:-1]]
    assert len(told) == 3 and told[-1]["error"]["code"] == 500 and "model.py:shout" in told[-1]["error"]["message"]
    assert engine.aborted == 1 and engine.running == 0 and now() - began_s < 0.1


async def test_output_formatter_fails_on_the_first_chunk() -> None:
    """Before the first byte there is still a true status to be had."""
    app = front(FakeEngine(), plugs={"formatters": FakeFormatters(has_output=True, fails_at=0)})
    assert (await invoke(app, {"prompt": "Say", "stream": True})).status_code == 500


async def test_a_formatter_without_a_turn() -> None:
    """Its 503 says when to try again."""

    class Busy(FakeFormatters):
        async def input(self, adapter: str | None, payload: Any, headers: Mapping[str, str], owner: str) -> Any:
            raise FormatterError("model.py:ask had no turn", phase="input", name="model.py:ask", status=503)

    answer = await invoke(front(FakeEngine(), plugs={"formatters": Busy(has_input=True)}), {"inputs": "Say"})
    assert answer.status_code == 503 and int(answer.headers["retry-after"]) > 0


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors_of_openai(stream: bool) -> None:
    """On OpenAI's routes parameters keep OpenAI's names, with a formatter as without."""
    plugs = {"formatters": FakeFormatters(has_output=True)}
    app = front(FakeEngine(error=(400, "max_tokens is too large", "max_tokens")), plugs=plugs)
    answer = await invoke(app, {"prompt": "Say", "stream": stream}, "/v1/completions")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_errors(stream: bool) -> None:
    """The engine's refusal keeps its status and its shape, and names the parameter as the client knows it."""
    app = front(FakeEngine(error=(400, "max_tokens is too large", "max_tokens")))
    answer = await invoke(app, {"inputs": "Say", "stream": stream})
    error = {"message": "max_tokens is too large", "type": "BadRequestError", "param": "max_new_tokens", "code": 400}
    assert (answer.status_code, answer.json()) == (400, {"error": error})


@pytest.mark.parametrize(
    ("body", "path"),
    [({"inputs": "Say"}, "/invocations"), ({"prompt": "Say"}, "/invocations"), ({"prompt": "Say"}, "/v1/completions")],
)
@pytest.mark.parametrize("fails_at", [0, 1])
async def test_streams_that_fail(body: Any, path: str, fails_at: int) -> None:
    """Before the first byte an error has its status; after it, it is the last event, in the stream's own form."""
    answer = await invoke(front(FakeEngine(fails_at=fails_at)), body | {"stream": True}, path)
    if not fails_at:
        assert answer.status_code == 500 and answer.json()["error"]["message"] == "the engine failed"
        return
    told = rows(answer) if "inputs" in body else [json.loads(event) for event in sse(answer)[:-1]]
    assert answer.status_code == 200 and [("error" in row) for row in told] == [False, True]
    assert told[-1]["error"] == {
        "message": "the engine failed",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }


async def test_one_shape() -> None:
    """Whatever the app itself answers to what it does not know, or breaks on, has the shape of all errors."""
    async with client(front(FakeEngine())) as http:
        for method, path, status, kind in (
            ("GET", "/nothing", 404, "NotFoundError"),
            ("GET", "/invocations", 405, "MethodNotAllowedError"),
            ("GET", "/broken", 500, "InternalServerError"),
            ("POST", "/receipt", 409, "ConflictError"),
        ):
            answer = await http.request(method, path)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["type"]) == (status, status, kind)
            assert error["message"] and error["param"] is None


@pytest.mark.parametrize(
    ("path", "status"), [("/invocations", 424), ("/v1/chat/completions", 424), ("/v1/completions", 400)]
)
async def test_compat(path: str, status: int) -> None:
    """With --compat lmi, routes that LMI has answer 424 where it does; the others stay true."""
    app = front(FakeEngine(error=(400, "no", None)), compat="lmi")
    for body in ({"prompt": "Say"}, {"inputs": 1}):  # the engine refuses, or hotspan
        answer = await invoke(app, body, path)
        assert answer.status_code == answer.json()["error"]["code"] == status


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
@pytest.mark.parametrize(
    ("status", "compat"), [(429, "none"), (503, "none"), (429, "lmi"), (503, "lmi"), (500, "none")]
)
async def test_when_to_try_again(path: str, status: int, compat: str) -> None:
    """With 429 and 503 there is one Retry-After, whoever refuses; with other errors there is none."""
    app = front(FakeEngine(error=(status, "no", None)), compat=compat)
    answer = await invoke(app, {"prompt": "Say"}, path)
    assert (len(answer.headers.get_list("retry-after")) == 1) == (status != 500)


async def test_the_engines_own_time_to_try_again() -> None:
    """What the engine says of it stands, once."""
    engine = FastAPI()
    engine.add_api_route("/busy", lambda: Response(status_code=503, headers={"Retry-After": "42"}), methods=["GET"])
    async with client(Front(engine, *split(), is_alive=lambda: True)) as http:
        assert (await http.get("/busy")).headers.get_list("retry-after") == ["42"]


async def test_compat_inside_a_stream() -> None:
    """So does the last event of a stream."""
    answer = await invoke(front(FakeEngine(fails_at=1), compat="lmi"), {"inputs": "Say", "stream": True})
    assert rows(answer)[-1]["error"]["code"] == 424


# -- ids, attributes, ping ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "known"),
    [
        ({"X-Request-Id": "r-1"}, "r-1"),
        ({"X-Amzn-SageMaker-Inference-Id": "i-1"}, "i-1"),
        ({"X-Request-Id": "r-1", "X-Amzn-SageMaker-Inference-Id": "i-1"}, "r-1"),
        ({"X-Request-Id": "x" * 129}, None),
        ({}, None),
    ],
)
@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
async def test_request_ids(headers: dict[str, str], known: str | None, path: str) -> None:
    """The client's id, else one of ours, is the engine's and the answer's; an inference id is echoed beside it."""
    engine = FakeEngine()
    async with client(front(engine)) as http:
        answer = await http.post(path, json={"prompt": "Say"}, headers=headers)
    given = answer.headers["x-request-id"]
    assert given == engine.seen[-1][2]["x-request-id"] and (given == known or (known is None and len(given) == 32))
    assert answer.headers.get("x-amzn-sagemaker-inference-id") == headers.get("X-Amzn-SageMaker-Inference-Id")


async def test_custom_attributes() -> None:
    """They go to the engine and come back, on errors as well; what can't be a header does not."""
    engine, attributes = FakeEngine(), "X-Amzn-SageMaker-Custom-Attributes"
    app = front(engine)
    async with client(app) as http:
        answer = await http.post("/invocations", json={"inputs": "Say"}, headers={attributes: "trace=7"})
        wrong = await http.post("/invocations", json={}, headers={attributes: "trace=8"})
        long = await http.post("/invocations", json={}, headers={attributes: "x" * 2000})
    assert engine.seen[-1][2][attributes.lower()] == answer.headers[attributes] == "trace=7"
    assert wrong.status_code == 400 and wrong.headers[attributes] == "trace=8" and attributes not in long.headers


@pytest.mark.parametrize(
    ("alive", "draining", "compat", "status", "said"),
    [
        (True, False, "none", 200, "Healthy"),
        (True, True, "none", 503, "Draining"),
        (False, False, "none", 503, "Unhealthy"),
        (False, False, "lmi", 500, "Unhealthy"),
    ],
)
async def test_ping(alive: bool, draining: bool, compat: str, status: int, said: str) -> None:
    """/ping tells whether the engine lives and takes requests; a 503 says when to ask again."""
    app = front(FakeEngine(), alive=alive, compat=compat)
    if draining:
        app.admission.drain()
    async with client(app) as http:
        for method in ("GET", "POST"):
            answer = await http.request(method, "/ping")
            assert (answer.status_code, answer.json()) == (status, {"status": said})
            assert ("retry-after" in answer.headers) == (status == 503)


async def test_the_tenant_reaches_the_engine() -> None:
    """What works for a request works for its tenant, however many tasks it takes."""
    engine = FakeEngine()
    app = front(engine)
    for body, path in (({"inputs": "Say", "stream": True}, "/invocations"), ({"prompt": "Say"}, "/v1/completions")):
        with asking(Principal("acme", has_key=True)):
            await invoke(app, body, path)
        assert engine.seen[-1][3] == "acme"


async def test_root_path() -> None:
    """Behind a proxy's prefix the routes are the same, stripped by the proxy or not."""
    engine = FakeEngine()
    app = front(engine)
    app.root_path = "/api"
    for prefix in ("", "/api"):
        assert (await invoke(app, {"inputs": "Say"}, f"{prefix}/invocations")).status_code == 200
