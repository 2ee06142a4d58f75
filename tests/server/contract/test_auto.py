"""A server for which nobody named a tier: `option.lmcache_auto_config=True` chooses them, by what its machine has."""

import itertools
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotspan.bench.prose import prose

from .rig import Container, rows
from .rig import container as serving

pytestmark = pytest.mark.engine

SHARED_MIB = 512
SMALL = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
SMALL += [f'mount -t tmpfs -o size={SHARED_MIB}m tmpfs /dev/shm && exec "$@"', "sh"]
"""A container with a small /dev/shm: the tier takes what there is, and on a large machine that takes long to fill."""

VARIABLES = {
    "OPTION_LMCACHE_AUTO_CONFIG": "True",
    "HOTSPAN_PERSISTENCE": "none",  # a disk tier would take what this machine's disk has left
    "OPTION_DTYPE": "fp32",
    "OPTION_MAX_MODEL_LEN": "2048",
    "OPTION_BLOCK_SIZE": "128",
    "OPTION_NUM_GPU_BLOCKS_OVERRIDE": "20",
    "OPTION_ENFORCE_EAGER": "true",
    "OPTION_SPECULATIVE_CONFIG": json.dumps(
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    ),
}
FILLING = 3
"""Prompts of 1,000 tokens and more that fill the engine's own pool."""

PROMPT = prose(4, 700)


@pytest.fixture(scope="module")
def sized(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    tried = subprocess.run([*SMALL, "true"], capture_output=True, text=True)
    if tried.returncode:
        pytest.skip(f"no namespace for a /dev/shm of its own here: {tried.stderr.strip()}")
    variables = VARIABLES | {"HF_MODEL_ID": str(tiny_model)}
    with serving(tmp_path_factory.mktemp("sized"), variables, within=SMALL) as running:
        yield running


def asked(container: Container, prompt: str) -> Any:
    reply = container.http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "temperature": 0})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_tiers_are_chosen(sized: Container) -> None:
    """The RAM tier is what /dev/shm leaves; the log says so and why, and the metrics and the admin API agree."""
    log = sized.server.log.read_text()
    ready = re.search(r"^hotspan is ready.* ([0-9.]+) GiB of RAM$", log, re.MULTILINE)
    assert ready is not None, log[-3000:]
    ram = round(float(ready[1]) * 1024)
    assert SHARED_MIB / 2 < ram < SHARED_MIB
    assert re.search(rf"RAM +│ {ram}\.0 MiB +│ /dev/shm minus a tenth", log)
    (replica,) = sized.admin.get("/hotspan/cache").json()["replicas"]
    assert replica["tiers"].keys() == {"ram"} and replica["tiers"]["ram"]["is_up"]
    found = sized.gauge("hotspan_cache_capacity_bytes")
    assert found == replica["tiers"]["ram"]["capacity_bytes"] == pytest.approx(ram << 20, rel=0.01)


def test_what_was_asked_is_a_hit(sized: Container) -> None:
    """A prompt comes back from the chosen tier once the engine's own cache has other things to hold."""
    first = asked(sized, PROMPT)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    before, deadline, others = sized.gauge("hotspan_cache_hit_tokens_total"), time.monotonic() + 60, itertools.count(50)
    again = first
    while sized.gauge("hotspan_cache_hit_tokens_total") == before:
        assert time.monotonic() < deadline, "no hit"
        for _ in range(FILLING):
            asked(sized, prose(next(others), 600))
        again = asked(sized, PROMPT)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 1024
    assert again["choices"][0]["text"] == first["choices"][0]["text"]


def test_accepted_drafts_are_counted(sized: Container) -> None:
    """Each answer says how many drafted tokens were accepted, in `usage` and beside it; a stream in its last chunk; and
    vLLM's counters in /metrics add them up."""
    names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    before = [sized.gauge(name) for name in names]
    body = {"prompt": "Count", "max_tokens": 100, "temperature": 0}
    whole = reported(sized.http.post("/v1/completions", json=body).json())
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    events = sized.http.post("/v1/completions", json=streamed).text.splitlines()
    last = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")][-1]
    counts = [one[f"num_{what}draft_tokens"] for what in ("", "accepted_") for one in (whole, reported(last))]
    assert 0 < whole["draft_acceptance_rate"] <= 1 < whole["mean_acceptance_length"]
    wanted = [before[0] + sum(counts[:2]), before[1] + sum(counts[2:])]
    deadline = time.monotonic() + 60
    while [sized.gauge(name) for name in names] != wanted:  # they are counted after the answer is sent
        assert time.monotonic() < deadline, (wanted, [sized.gauge(name) for name in names])
        time.sleep(0.05)


def reported(answer: dict[str, Any]) -> dict[str, Any]:
    """The counts of an answer, or of a stream's chunk with usage, which has them as well."""
    found: dict[str, Any] = answer["metrics"]["speculative_decoding"]
    usage, accepted = answer["usage"], found["num_accepted_draft_tokens"]
    assert usage["completion_tokens"] == 100
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == accepted
    assert usage["completion_tokens_details"]["rejected_prediction_tokens"] == found["num_draft_tokens"] - accepted
    return found


_CHAT = [{"role": "user", "content": "Count"}]
_TWICE = {"n": 2, "temperature": 0.1, "max_tokens": 60, "ignore_eos": True}
_BODIES: dict[str, Any] = {
    "/v1/completions": _TWICE | {"prompt": ["Count", "Say"]},
    "/v1/chat/completions": _TWICE | {"messages": _CHAT},
    "/v1/responses": {"input": "Count", "max_output_tokens": 60, "temperature": 0},
    "/v1/messages": {"messages": _CHAT, "max_tokens": 60, "temperature": 0},
    "/invocations": {"inputs": "Count", "parameters": {"max_new_tokens": 60, "do_sample": False, "details": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", _BODIES)
def test_every_schema_has_the_counts(sized: Container, path: str, stream: bool) -> None:
    """The counts in an answer, streamed or not, are those by which vLLM's counters in /metrics grow."""
    names = ("vllm:spec_decode_num_draft_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
    before = [sized.gauge(name) for name in names]
    body = _BODIES[path] | {"stream": stream}
    if path == "/v1/responses" or path == "/v1/messages":
        body |= {"model": sized.http.get("/v1/models").json()["data"][0]["id"]}
    if stream and "completions" in path:
        body |= {"stream_options": {"include_usage": True}}
    reply = sized.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    found = told(reply.text, path) if stream else reply.json()
    if path == "/v1/responses" and stream:
        found = found["response"]
    details = found["details"] if path == "/invocations" else found["usage"]
    details = details.get("completion_tokens_details") or details.get("output_tokens_details") or details
    accepted, rejected = (details[f"{what}_prediction_tokens"] for what in ("accepted", "rejected"))
    assert (accepted if "n" not in body else accepted + rejected) > 0
    wanted = [before[0] + accepted + rejected, before[1] + accepted]
    deadline = time.monotonic() + 60
    while [sized.gauge(name) for name in names] != wanted:  # they are counted after the answer is sent
        assert time.monotonic() < deadline, (wanted, [sized.gauge(name) for name in names])
        time.sleep(0.05)


def told(stream: str, path: str) -> Any:
    """The last row or event of a stream that has counts."""
    lines = stream.splitlines() if path == "/invocations" else re.findall(r"^data: (\{.*)", stream, re.MULTILINE)
    return json.loads([line for line in lines if "accepted_prediction_tokens" in line][-1])


def test_several_tokens_in_a_chunk(sized: Container) -> None:
    """Speculation gives several tokens at a time: a stream in LMI's schema has a row for each all the same."""
    asked = {"prompt": "Say", "max_tokens": 200, "temperature": 0, "stream": True, "return_token_ids": True}
    events = sized.http.post("/v1/completions", json=asked).text.splitlines()
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    parts = [choice.get("token_ids") or [] for chunk in chunks for choice in chunk["choices"]]
    assert max(map(len, parts)) > 1
    body = {"inputs": "Say", "parameters": {"max_new_tokens": 200, "do_sample": False, "details": True}}
    whole, told = sized.invoke(body).json(), rows(sized.invoke(body | {"stream": True}))
    ids = [row["token"]["id"] for row in told]
    assert ids == [token["id"] for token in whole["details"]["tokens"]] == [one for part in parts for one in part]
    assert "".join(row["token"]["text"] for row in told) == told[-1]["generated_text"] == whole["generated_text"]
    assert told[-1]["details"]["generated_tokens"] == whole["details"]["generated_tokens"] == len(told) == 200
