"""model.py on a real server: the base model's functions, an adapter's in their place, and their failures."""

import json

import openai
import pytest

from .rig import ADAPTER, ATTRIBUTES, GREEDY, Container, rows

pytestmark = pytest.mark.engine

SIGN, BREAK = {ATTRIBUTES: "sign"}, {ATTRIBUTES: "break"}
LIMIT_S = 5


def test_input_comes_before_the_schema_is_chosen(container: Container) -> None:
    """A body that is in no schema becomes one of LMI's by the input formatter, which has the tokenizer."""
    reply = container.invoke({"topic": "rivers", "parameters": GREEDY})
    assert reply.status_code == 200, reply.text
    expected = container.invoke({"inputs": "About rivers:", "parameters": GREEDY}).json()
    assert reply.json() == expected


@pytest.mark.parametrize("path", ["/invocations", "/v1/completions"])
def test_an_adapters_formatter_stands_in_the_models_place(container: Container, path: str) -> None:
    """The base model's output formatter signs; `legal` has its own; `poet` has none, so the base model's holds."""
    signed = {}
    for name in ("", "legal", "poet"):
        reply = container.http.post(
            path, json={"prompt": "Say", "max_tokens": 2}, headers=SIGN | ({ADAPTER: name} if name else {})
        )
        signed[name] = reply.json()["served_by"]
    assert signed == {"": "model", "legal": "legal", "poet": "model"}
    reply = container.invoke({"topic": "rivers"}, **{ADAPTER: "legal"})
    assert reply.json()["served_by"] == "legal"  # and the base model's input formatter


def test_streams_are_formatted_chunk_by_chunk(container: Container) -> None:
    """Every row and every event goes through the formatter, and the form of the stream stays."""
    body = {"inputs": "Say", "parameters": GREEDY | {"max_new_tokens": 5}, "stream": True}
    told = rows(container.http.post("/invocations", json=body, headers=SIGN))
    assert len(told) == 5 and all(row["served_by"] == "model" for row in told)
    reply = container.http.post(
        "/v1/completions", json={"prompt": "Say", "max_tokens": 5, "temperature": 0, "stream": True}, headers=SIGN
    )
    events = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    assert all(json.loads(event)["served_by"] == "model" for event in events)


def test_a_failure_in_a_stream_reaches_openais_client(container: Container) -> None:
    """The client gets the chunks before it, and then raises. How many tokens a chunk has is up to vLLM."""
    stream = container.openai.chat.completions.create(
        model="lmi",
        messages=[{"role": "user", "content": "Say"}],
        max_tokens=5,
        temperature=0,
        stream=True,
        extra_headers=BREAK,
    )
    got = []
    with pytest.raises(openai.APIError, match="no more paper"):
        for chunk in stream:
            got.append(chunk)
    assert got and not any(choice.finish_reason for chunk in got for choice in chunk.choices)


# -- other ways to write one -------------------------------------------------------------------------------------------


def test_model_py_is_executed_once(container: Container) -> None:
    """However many requests, phases and processes there are."""
    for _ in range(10):
        container.generate("Say")
    assert container.server.log.read_text().count("model.py is executed") == 1
