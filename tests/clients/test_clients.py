"""Unmodified clients against server and router: what they send is answered, and what they say of caching means what
they expect, or is named as having no effect (docs/clients.md). `make clients` runs it.

Each client runs in a process of the environment of requirements.txt; one engine for all.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import serving
from tests.server.test_replicas import routing

HERE = Path(__file__).parent
PYTHON = HERE.parents[1] / ".venv-clients" / "bin" / "python"
NAME = "tiny"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not PYTHON.exists(), reason="no clients here: make clients installs and asks them"),
]


@dataclass(frozen=True)
class Place:
    """Where clients ask, and the server that answers."""

    url: str
    server: str

    def ask(self, client: str) -> Any:
        """What came of a client's calls."""
        usual = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [str(PYTHON), str(HERE / "ask.py"), client, self.url, NAME]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=usual, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    def metric(self, name: str) -> float:
        """The sum over a metric's series at the server."""
        lines = httpx.get(self.server + "/metrics", timeout=60).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def places(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Place]]:
    """A server, and a router before it."""
    logs = tmp_path_factory.mktemp("clients")
    options = ("--ram-gib", "0.2", "--served-model-name", NAME)
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with (
        serving(tiny_model, logs / "server.log", *options, *tools) as server,
        routing(tiny_model, [server.url], logs / "router.log", "--model-name", NAME) as router,
    ):
        yield {"server": Place(server.url, server.url), "router": Place(router.url, server.url)}


@pytest.fixture(params=["server", "router"])
def place(request: pytest.FixtureRequest, places: dict[str, Place]) -> Place:
    return places[request.param]


def test_openai(place: Place) -> None:
    """Chats, streams, JSON by a schema, tools (which a model that nobody trained does not call), `n`, logprobs,
    completions, responses; a prompt that is kept for 24 h is pinned, and what means nothing is a 400.
    """
    told = place.ask("openai")
    assert told["prompt"] > told["cached"] >= 128 and told["streamed"] >= told["cached"]
    assert told["shaped"].keys() == {"warm"} and told["offered"] >= told["bare"] > 0
    assert (told["answers"], told["logprobs"], told["text"], told["response"]) == (2, 4, True, "response")
    assert "in_memory or 24h" in told["refused"]
    assert place.metric("hotspan_cache_pins") >= 1
    explained = told["explained"]
    assert told["id"] in explained["request"] and [part["reason"] for part in explained["computed"]] == ["tail"]


def test_anthropic(place: Place) -> None:
    """Messages and streams; usage adds up to the prompt and tells what was read from the cache; a breakpoint pins."""
    told = place.ask("anthropic")
    usage = told["usage"]
    sums = {
        sum(each.get(name) or 0 for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"))
        for each in usage
    }
    assert len(sums) == 1, usage
    assert usage[1]["cache_read_input_tokens"] >= 128 and usage[2]["cache_read_input_tokens"] >= 128
    assert '"1h"' in told["refused"].replace('\\"', '"') and told["type"] == "message"
    assert place.metric("hotspan_cache_pins") >= 1


@pytest.mark.parametrize("client", ["litellm", "langchain", "llama_index"])
def test_those_that_wrap_them(place: Place, client: str) -> None:
    """What was cached comes through to their users, and streams are whole."""
    told = place.ask(client)
    assert told["cached"] >= 128 and told["parts"] > 1


def test_boto3(place: Place) -> None:
    """`sagemaker-runtime` with `endpoint_url`: LMI's schema and chats, by the endpoint's name."""
    assert place.ask("boto3") == {"generated": True, "choices": 1}


def test_instructor(place: Place) -> None:
    """An object of the asked type."""
    assert isinstance(place.ask("instructor")["warm"], bool)
