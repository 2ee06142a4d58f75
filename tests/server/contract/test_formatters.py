"""model.py on a real server: the base model's functions, an adapter's in their place, and their failures."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .rig import ADAPTER, ATTRIBUTES, GREEDY, Container, rows, the_error

pytestmark = pytest.mark.engine

SIGN, BREAK = {ATTRIBUTES: "sign"}, {ATTRIBUTES: "break"}
LIMIT_S = 5

_DECLARED = """
input:
  schema: {required: [inputs], properties: {parameters: {properties: {max_new_tokens: {maximum: 50}}}}}
  prefix: "About rivers: "
  defaults: {max_new_tokens: 3, do_sample: false}
output:
  metadata: {request: $request_id, adapter: $adapter}
  rename: {generated_text: answer}
"""

_SAGEMAKERS = """
import json

asked = []


def input_fn(input_data, content_type):
    payload = json.loads(input_data)
    asked.append(content_type)
    return {"inputs": payload["question"], "parameters": payload["parameters"]}


def output_fn(prediction, accept):
    return json.dumps({"said": prediction.generated_text, "asked": asked, "accept": accept})
"""

_SLOW = """
import threading

from djl_python.input_parser import input_formatter


@input_formatter
def slow(decoded_payload):
    if decoded_payload.pop("hang", False):
        threading.Event().wait(30)
    return decoded_payload
"""

_COUNTS = """
from djl_python.output_formatter import output_formatter

count = 0


@output_formatter
def counted(output):
    global count
    count += 1
    output["count"] = count
    return output
"""


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


# -- other ways to write one -------------------------------------------------------------------------------------------


def test_a_formatter_without_code(container: Container) -> None:
    """formatter.yaml of an adapter: what it refuses, what it adds to the prompt and to the answer, and its streams."""
    parameters = {"max_new_tokens": 3, "do_sample": False}
    expected = container.generate("About rivers: long ones", parameters=parameters, adapters="poet")
    with container.adapter("declared", like="poet", files={"formatter.yaml": _DECLARED}):
        named = {ADAPTER: "declared"}
        reply = container.invoke({"inputs": "long ones"}, x_request_id="r-1", **named)
        metadata = {"request": "r-1", "adapter": "declared"}
        assert reply.json() == {"answer": expected, "metadata": metadata}
        told = rows(container.invoke({"inputs": "long ones", "stream": True}, x_request_id="r-1", **named))
        assert len(told) == 3 and all(row["metadata"] == metadata for row in told)
        assert told[-1]["answer"] == expected and "generated_text" not in told[-1]
        error = the_error(container.invoke({"inputs": "a", "parameters": {"max_new_tokens": 51}}, **named), 400)
        assert "declared/formatter.yaml:input" in error["message"] and "max_new_tokens" in error["message"]


def test_sagemakers_own_functions(container: Container) -> None:
    """input_fn gets the body and its type, output_fn the answer and what is accepted; they share their module."""
    expected = container.generate("Say", adapters="poet")
    with container.adapter("functions", like="poet", files={"model.py": _SAGEMAKERS}):
        body = {"question": "Say", "parameters": GREEDY}
        for turn in (1, 2):
            reply = container.invoke(body, **{ADAPTER: "functions", "accept": "application/json"})
            kind = "application/json"
            assert reply.json() == {"said": expected, "asked": [kind] * turn, "accept": kind}


def test_a_formatter_that_hangs(container: Container) -> None:
    """It is a 504 that names it once its time is over, and meanwhile others are answered, of the same adapter too."""
    with container.adapter("slow", like="poet", files={"model.py": _SLOW}), ThreadPoolExecutor() as threads:
        hung = threads.submit(container.invoke, {"inputs": "Say", "hang": True}, **{ADAPTER: "slow"})
        beside = container.invoke({"inputs": "Say", "parameters": GREEDY}, **{ADAPTER: "slow"})
        assert beside.status_code == 200 and container.generate("Say")
        message = the_error(hung.result(60), 504)["message"]
        assert "input formatter slow/model.py:slow" in message and f"{LIMIT_S} s" in message


def test_equal_names_share_nothing(container: Container) -> None:
    """Adapters a-b and a.b are two: each has its weights, and its model.py's variables."""
    files = {"model.py": _COUNTS}
    with container.adapter("a-b", like="legal", files=files), container.adapter("a.b", like="poet", files=files):
        replies = [
            container.invoke({"inputs": "Say", "parameters": GREEDY}, **{ADAPTER: name}).json()
            for name in (*("a-b", "a.b", "a-b", "a.b", "a-b"),)
        ]
    assert [reply["count"] for reply in replies] == [1, 1, 2, 2, 3]
    texts = [reply["generated_text"] for reply in replies]
    assert texts[0] == texts[2] == texts[4] != texts[1] == texts[3]
    assert texts[1] == container.generate("Say", adapters="poet")


def test_model_py_is_executed_once(container: Container) -> None:
    """However many requests, phases and processes there are."""
    for _ in range(10):
        container.generate("Say")
    assert container.server.log.read_text().count("model.py is executed") == 1
