"""Requests that nobody would write, made from the server's own OpenAPI document: it refuses them, and never fails."""

from collections import Counter
from http import HTTPStatus
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from hotspan.http.paths import ADAPTER_WRITES
from hotspan.server.policy import ADMIN, CLIENT, PUBLIC

from .rig import ADAPTER, ADMIN_TOKEN, SESSION, Container

pytestmark = pytest.mark.engine

FEW, MANY = 300, 10_000
MOST_TOKENS = 4
_NAME = {"type": "string"}
_TEXTS = {"type": "array", "items": {"type": "string"}}
_NUMBER, _WHOLE, _FLAG = {"type": "number"}, {"type": "integer"}, {"type": "boolean"}
_PARAMETERS = {
    **dict.fromkeys(("max_new_tokens", "truncate", "top_n_tokens", "top_k", "seed", "logprobs", "min_tokens"), _WHOLE),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"), _NUMBER),
    **dict.fromkeys(("details", "decoder_input_details", "do_sample", "return_full_text", "ignore_eos_token"), _FLAG),
    **dict.fromkeys(("stop_sequences", "bad_words"), _TEXTS),
    "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
    "response_format": {"type": "object", "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}}},
}
_LMI = {
    "type": "object",
    "properties": {
        "inputs": {"type": "string"},
        "parameters": {"type": "object", "properties": _PARAMETERS},
        "stream": _FLAG,
        "adapters": {"enum": ["", "legal", "poet", "nobody"]},
        "model": {"enum": ["lmi", "poet", "nobody"]},
        "requestType": {"enum": ["NEW_SESSION", "CLOSE", "OPEN"]},
    },
}
_HEADERS = [{"in": "header", "name": name, "schema": _NAME} for name in (SESSION, ADAPTER)]
_BY_NAME = {"in": "path", "name": "model", "required": True, "schema": {"enum": ["lmi", "model", "nobody"]}}
_REGISTERED = ("here", "there")
"""Adapters that the requests may register, change and delete: the other tests need theirs."""

_CHANGE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "src": {"enum": ["legal", "poet", "torn", "nobody", "../model", "/etc", "s3://bucket/legal"]},
        "preload": _FLAG,
        "pin": _FLAG,
    },
    "additionalProperties": False,
}
_ADAPTER = _CHANGE | {
    "properties": {"name": {"enum": [*_REGISTERED, "lmi", ""]}, **_CHANGE["properties"]},
    "required": ["name", "src"],
}
_WHICH = {"in": "path", "name": "adapter_name", "required": True, "schema": {"enum": [*_REGISTERED, "nobody"]}}


def post(body: Any, *parameters: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": body}}
    said = {"requestBody": {"required": True, "content": content}, "parameters": list(parameters)}
    return {"post": said | {"responses": {"200": {"description": "An answer."}}}}


OURS = {
    "/predictions/{model}": post(_LMI, _BY_NAME, *_HEADERS),
    "/models/{model}/invoke": post(_LMI, _BY_NAME),
    "/endpoints/{model}/invocations": post(_LMI, _BY_NAME),
}
"""LMI's routes, which FastAPI does not know."""

ADMINISTRATION = {*ADAPTER_WRITES, *(path for path in ADMIN if path.startswith("/hotspan/"))}
"""The administrator's routes that leave the server as it was for the other tests: adapters, and hotspan's own."""


def every_request(container: Container) -> st.SearchStrategy[Any]:
    """Requests that fit the document, and requests that don't, to every route that a client or its operator may ask."""
    document = container.http.get("/openapi.json").json()
    allowed = {*CLIENT, *PUBLIC, *ADMINISTRATION}
    document["paths"] = {path: found for path, found in document["paths"].items() if path in allowed} | OURS
    for path in ADAPTER_WRITES:  # FastAPI knows nothing of their arguments
        document["paths"][path]["parameters"] = [
            named for named in (_BY_NAME, _WHICH) if f"{{{named['name']}}}" in path
        ]
        if "post" in document["paths"][path]:
            document["paths"][path] |= post(_CHANGE if path.endswith("/update") else _ADAPTER)
    schema = schemathesis.openapi.from_dict(document)
    return st.one_of(*(schema.as_strategy(generation_mode=mode) for mode in GenerationMode))


def cheap(body: Any) -> Any:
    """The same request, which asks for few tokens and sequences where it would have asked for very many."""
    if not isinstance(body, dict):
        return body
    lengths, numbers = ("max_tokens", "max_completion_tokens", "max_output_tokens"), ("n", "best_of")
    asked: Any = body
    if "inputs" in body:
        asked, lengths, numbers = body.get("parameters"), ("max_new_tokens",), ("n", "top_n_tokens")
    elif not {"prompt", "messages", "input"} & body.keys():
        return body
    for name in (*lengths, *numbers) if isinstance(asked, dict) else ():
        is_too_many = isinstance(asked.get(name), int) and asked[name] > MOST_TOKENS
        if is_too_many or (name in lengths and asked.get(name) is None):
            asked[name] = MOST_TOKENS
    return body


def problem(reply: Any) -> str | None:
    """What is wrong with an answer; None if nothing is."""
    if reply.status_code == 503 and "retry-after" in reply.headers:
        return None
    if reply.status_code == HTTPStatus.INSUFFICIENT_STORAGE:
        return None  # all slots are pinned, which a client can't know
    if reply.status_code >= 500 and reply.status_code != HTTPStatus.NOT_IMPLEMENTED:  # what this model is not made for
        return "it failed"
    if reply.status_code < 400:
        return None
    try:
        error = reply.json()["error"]
    except (ValueError, KeyError, TypeError):
        return "an error of another shape"
    return None if error["message"] and error["type"] and error["code"] else "an error that says nothing"


def ask(container: Container, requests: int) -> None:
    """So many requests, one after the other. Raises: AssertionError with a command for each that went wrong."""
    found: dict[str, str] = {}
    statuses: Counter[int] = Counter()
    admin = {"authorization": f"Bearer {ADMIN_TOKEN}"}

    @settings(
        max_examples=requests,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=every_request(container))
    def one(case: Any) -> None:
        case.body = cheap(case.body)
        reply = case.call(base_url=container.server.url, timeout=60, headers=admin)
        statuses[reply.status_code] += 1
        if (wrong := problem(reply)) is not None:
            place = f"{case.method} {case.path}: {reply.status_code}: {wrong}"
            found.setdefault(place, f"{reply.text[:300]}\n{case.as_curl_command()[:1000]}")

    try:
        one()
    finally:
        for name in _REGISTERED:
            container.admin.delete(f"/adapters/{name}")
    print(dict(statuses))
    assert not found, "\n\n".join(f"{place}\n{details}" for place, details in found.items())
    assert container.http.get("/ping").status_code == 200
    assert statuses.total() >= requests and statuses[200] > 0 and not statuses[401]
    assert container.generate("Say")


def test_unexpected_requests(container: Container) -> None:
    """A few hundred: each is answered or refused in the one shape, and the server lives."""
    ask(container, FEW)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ten_thousand_unexpected_requests(container: Container) -> None:
    """The same at length."""
    ask(container, MANY)
