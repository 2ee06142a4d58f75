"""/invocations of a real server: LMI's schema to the letter, the other schemas by their keys, errors and limits."""

import json
import re
import time
from typing import Any

import pytest

from hotspan.bench.prose import prose

from .rig import GREEDY, Container, rows, the_error

pytestmark = pytest.mark.engine

PROMPT = prose(3, 12)
CHAT = [{"role": "user", "content": PROMPT}]


def detailed(container: Container, **parameters: Any) -> dict[str, Any]:
    """An answer with its details."""
    reply = container.invoke({"inputs": PROMPT, "parameters": GREEDY | {"details": True} | parameters})
    assert reply.status_code == 200, reply.text
    answer = reply.json()
    assert isinstance(answer, dict)
    return answer


# -- from nothing to a server ------------------------------------------------------------------------------------------


def test_the_port_answers_before_the_model_does(container: Container) -> None:
    """/ping is 503 Loading, then 200 Healthy, and nothing else; who asks too early is told when to come back."""
    assert container.pings == [(503, "Loading"), (200, "Healthy")]
    assert int(container.early["Loading"].headers["retry-after"]) > 0
    early = container.early["/invocations"]
    assert int(early.headers["retry-after"]) > 0 and "loading" in the_error(early, 503)["message"]
    assert container.http.post("/ping").json()["status"] == "Healthy"


def test_lmcache_is_taken_over(container: Container) -> None:
    """The tiers are those of LMCache's file, and what is asked goes into them."""
    ready = next(line for line in container.server.log.read_text().splitlines() if line.startswith("hotspan is ready"))
    assert re.search(r"0\.1 GiB of RAM, up to 0\.25 GiB in (/.*/kv), which stays .*\(hotspan cache remove \1\)$", ready)
    before = container.gauge("hotspan_cache_store_bytes_total")
    container.generate(prose(4, 700))
    deadline = time.monotonic() + 60
    while container.gauge("hotspan_cache_store_bytes_total") == before:
        assert time.monotonic() < deadline, "nothing was stored"
        container.generate("Hello")
        time.sleep(0.1)


def test_the_model_is_called_lmi(container: Container) -> None:
    """Requests may name the base model lmi, model, or not at all; in paths the same names hold, and no others."""
    text = container.generate(PROMPT)
    for name in ("lmi", "model"):
        assert container.generate(PROMPT, model=name) == text
        for path in (f"/predictions/{name}", f"/models/{name}/invoke", f"/endpoints/{name}/invocations"):
            reply = container.invoke({"inputs": PROMPT, "parameters": GREEDY}, path)
            assert reply.json() == {"generated_text": text}
    assert "lmi" in the_error(container.invoke({"inputs": PROMPT}, "/predictions/gpt"), 404)["message"]
    listed = [model["id"] for model in container.http.get("/v1/models").json()["data"]]
    assert listed[0] == "lmi" and {"legal", "poet"} <= set(listed)


# -- schemas -----------------------------------------------------------------------------------------------------------


def test_details_tell_every_token(container: Container) -> None:
    """Ids, texts that add up to the answer, and logarithms of probabilities; without details none of it."""
    answer = detailed(container)
    tokens = answer["details"]["tokens"]
    assert "".join(token["text"] for token in tokens) == answer["generated_text"]
    assert all(isinstance(token["id"], int) and token["log_prob"] <= 0 for token in tokens)
    plain = container.invoke({"inputs": PROMPT, "parameters": GREEDY}).json()
    assert plain == {"generated_text": answer["generated_text"]}


def test_a_list_is_answered_with_a_list(container: Container) -> None:
    """Each text of a batch gets what it gets alone, in the order of the list."""
    texts = [PROMPT, "Another text"]
    reply = container.invoke({"inputs": texts, "parameters": GREEDY})
    assert reply.status_code == 200, reply.text
    assert reply.json() == [{"generated_text": container.generate(text)} for text in texts]


def test_prefill_tells_the_prompt(container: Container) -> None:
    """decoder_input_details adds the prompt's tokens, the first without a probability, and changes nothing else."""
    plain, told = detailed(container), detailed(container, decoder_input_details=True)
    prefill = told["details"].pop("prefill")
    ids = container.http.post("/tokenize", json={"model": "lmi", "prompt": PROMPT}).json()["tokens"]
    assert [token["id"] for token in prefill] == ids
    assert prefill[0]["log_prob"] is None and all(token["log_prob"] <= 0 for token in prefill[1:])
    assert told["generated_text"] == plain["generated_text"]
    assert [one["id"] for one in told["details"]["tokens"]] == [one["id"] for one in plain["details"]["tokens"]]


def test_truncate_keeps_the_end_of_the_prompt(container: Container) -> None:
    """With truncate the last so many tokens are the prompt: the answer is that of those tokens alone."""
    ids = container.http.post("/tokenize", json={"model": "lmi", "prompt": PROMPT}).json()["tokens"]
    body = {"prompt": ids[-5:], "max_tokens": 10, "temperature": 0}
    expected = container.invoke(body).json()["choices"][0]["text"]
    parameters = GREEDY | {"truncate": 5, "details": True}
    assert container.generate(PROMPT, parameters=parameters) == expected
    last = rows(container.invoke({"inputs": PROMPT, "parameters": parameters, "stream": True}))[-1]
    assert last["details"]["input_length"] == 5


def test_sampling_is_off_with_do_sample_false(container: Container) -> None:
    """do_sample=false is greedy whatever the temperature; without it the temperature holds."""
    greedy = container.generate(PROMPT, parameters={"max_new_tokens": 10, "temperature": 0})
    off = {"max_new_tokens": 10, "temperature": 2.0, "do_sample": False}
    assert {container.generate(PROMPT, parameters=off) for _ in range(2)} == {greedy}
    hot = {"max_new_tokens": 10, "temperature": 2.0, "seed": 7}
    assert container.generate(PROMPT, parameters=hot) != greedy


def test_a_seed_repeats(container: Container) -> None:
    """The same seed gives the same text, another one another; the details say which it was."""
    hot = {"temperature": 2.0, "do_sample": True, "top_p": 0.99, "top_k": 500, "repetition_penalty": 1.01}
    first, again, other = (detailed(container, seed=seed, **hot) for seed in (7, 7, 8))
    assert first == again and first["details"]["seed"] == 7
    assert other["generated_text"] != first["generated_text"]


def test_stop_sequences_end_the_text(container: Container) -> None:
    """A stop sequence ends the generation and is not part of it."""
    whole = container.generate(PROMPT)
    stop = whole[len(whole) // 2 :][:3]
    answer = detailed(container, stop_sequences=[stop])
    assert answer["generated_text"] == whole[: whole.index(stop)]
    assert answer["details"]["finish_reason"] == "stop_sequence"


def test_the_models_own_end(container: Container) -> None:
    """The model's end token ends the text, unless ignore_eos_token says otherwise."""
    wants_to_end = {"logit_bias": {"2": 100}}
    ended = detailed(container, **wants_to_end)["details"]
    assert ended["finish_reason"] == "eos_token" and ended["generated_tokens"] == 1
    ignored = detailed(container, ignore_eos_token=True, **wants_to_end)["details"]
    assert ignored["finish_reason"] == "length" and ignored["generated_tokens"] == 10


def test_several_sequences(container: Container) -> None:
    """top_n_tokens asks for so many sequences: the others stand in the details."""
    details = detailed(container, top_n_tokens=3, do_sample=True, temperature=2.0, seed=1)["details"]
    others = details["best_of_sequences"]
    assert len(others) == 2 and all(one["generated_tokens"] == 10 for one in others)


@pytest.mark.parametrize(
    ("parameters", "param", "hint"),
    [
        ({"top_n_tokens": 129}, None, "at most 128"),
        ({"max_new_tokens": "many"}, "max_new_tokens", ""),
        ({"max_new_tokens": 1_000_000}, None, "2048"),
        ({"temperature": -1}, "temperature", ""),
    ],
)
def test_what_the_engine_refuses(container: Container, parameters: Any, param: str | None, hint: str) -> None:
    """400 with the parameter by the name that the client knows, and what would do."""
    error = the_error(container.invoke({"inputs": PROMPT, "parameters": parameters}), 400)
    assert hint in error["message"] and (param is None or error["param"] == param)


# -- streams -----------------------------------------------------------------------------------------------------------


def test_a_stream_has_a_row_for_every_token(container: Container) -> None:
    """The rows are the tokens of the whole answer, in order; the last one has the text and the details."""
    parameters = GREEDY | {"max_new_tokens": 20, "details": True}
    whole = container.invoke({"inputs": PROMPT, "parameters": parameters}).json()
    reply = container.invoke({"inputs": PROMPT, "parameters": parameters, "stream": True})
    assert reply.headers["content-type"] == "application/jsonlines"
    told = rows(reply)
    assert [row["token"]["id"] for row in told] == [token["id"] for token in whole["details"]["tokens"]]
    assert "".join(row["token"]["text"] for row in told) == told[-1]["generated_text"] == whole["generated_text"]
    assert all(row["generated_text"] is None and row["details"] is None for row in told[:-1])
    tokens = container.http.post("/tokenize", json={"model": "lmi", "prompt": PROMPT}).json()["count"]
    assert told[-1]["details"] == {
        "finish_reason": "length",
        "seed": None,
        "generated_tokens": 20,
        "input_length": tokens,
    }


@pytest.mark.parametrize("accept", ["application/jsonlines", "text/event-stream"])
def test_a_stream_comes_token_by_token(container: Container, accept: str) -> None:
    """Rows arrive as they are made: some are read while the engine still computes the others."""
    container.wait_until_idle()
    long = GREEDY | {"max_new_tokens": 2000, "ignore_eos_token": True}
    body = {"inputs": PROMPT, "parameters": long, "stream": True}
    with container.http.stream("POST", "/invocations", json=body, headers={"accept": accept}) as reply:
        assert reply.headers["content-type"].startswith(accept)
        rows = list[str]()
        for row in reply.iter_lines():
            rows.append(row)
            if container.gauge("vllm:num_requests_running"):
                break
        else:
            pytest.fail(f"the engine was idle while {len(rows)} rows came: {rows[:3]}, ..., {rows[-3:]}")
        assert json.loads(rows[0].removeprefix("data:"))["token"]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_of_routes(container: Container) -> None:
    """A route that is not there, a method that it does not have, a model that is not there: one shape for all."""
    the_error(container.admin.get("/v2/nothing"), 404)
    the_error(container.admin.get("/invocations"), 405)
    the_error(container.invoke({"prompt": PROMPT, "model": "gpt"}, "/v1/completions"), 404)
    the_error(container.invoke({"prompt": PROMPT, "max_tokens": "a"}, "/v1/completions"), 400)


# -- headers -----------------------------------------------------------------------------------------------------------


def test_the_engine_knows_the_request_by_its_id(container: Container) -> None:
    """The answer's own id is made of the request's, so that a log line can be found by it."""
    reply = container.invoke({"prompt": PROMPT, "max_tokens": 1}, "/v1/completions", x_request_id="find-me")
    assert "find-me" in reply.json()["id"]
