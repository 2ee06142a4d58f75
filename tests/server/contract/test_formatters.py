"""model.py on a real server: the base model's functions, an adapter's in their place, and their failures."""

import json

import openai
import pytest

from .rig import ADAPTER, ATTRIBUTES, GREEDY, Container, rows, the_error

pytestmark = pytest.mark.engine

SIGN, BREAK = {ATTRIBUTES: "sign"}, {ATTRIBUTES: "break"}


def test_input_comes_before_the_schema_is_chosen(container: Container) -> None:
    """A body that is in no schema becomes one of LMI's by the input formatter, which has the tokenizer."""
    reply = container.invoke({"topic": "rivers", "parameters": GREEDY})
    assert reply.status_code == 200, reply.text
    expected = container.invoke({"inputs": "About rivers:", "parameters": GREEDY}).json()
    assert reply.json() == expected


def test_what_a_formatter_refuses(container: Container) -> None:
    """Its ValueError is the client's error, and says what it said, whose it is and in which phase."""
    error = the_error(container.invoke({"topic": ""}), 400)
    assert "topic is empty" in error["message"] and "input formatter model/model.py:ask" in error["message"]


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


def test_a_failure_has_its_status(container: Container) -> None:
    """A formatter that breaks is a 500 that names it, the exception and the line."""
    error = the_error(container.http.post("/invocations", json={"inputs": "Say"}, headers=BREAK), 500)
    assert (
        "output formatter model/model.py:answer" in error["message"]
        and "RuntimeError: no more paper" in error["message"]
    )
    assert "line" in error["message"]


def test_a_failure_in_a_stream_is_its_last_row(container: Container) -> None:
    """What came before stays; the last row is the error in the one shape; the next request is served."""
    body = {"inputs": "Say", "parameters": GREEDY | {"max_new_tokens": 5}, "stream": True}
    told = rows(container.http.post("/invocations", json=body, headers=BREAK))
    assert len(told) == 5 and all("token" in row for row in told[:-1])
    assert told[-1]["error"]["code"] == 500 and "no more paper" in told[-1]["error"]["message"]
    assert container.generate("Say")


def test_a_failure_in_a_stream_reaches_openais_client(container: Container) -> None:
    """The client gets the chunks before it, and then raises."""
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
    assert len(got) >= 4
