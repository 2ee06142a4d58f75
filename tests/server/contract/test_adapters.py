"""LoRA adapters on a real server: chosen as SageMaker chooses them, loaded when they are first needed, once."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from .rig import ADAPTER, GREEDY, Container, rows, the_error

pytestmark = pytest.mark.engine

PROMPT = "The parties agree that"
BODY = {"inputs": PROMPT, "parameters": GREEDY}
CALLERS = 100
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def texts(container: Container) -> dict[str, str]:
    """What the base model, `legal` and `poet` say, by header."""
    said = {name: container.generate(PROMPT, headers={ADAPTER: name}) for name in ("legal", "poet")}
    said[""] = container.generate(PROMPT)
    assert len(set(said.values())) == 3
    return said


@pytest.fixture
def name(container: Container) -> Iterator[str]:
    """A name for an adapter, which is free again afterwards."""
    yield "late"
    container.admin.delete("/adapters/late")


def loads(container: Container, name: str) -> int:
    """How often the engine loaded an adapter for the server."""
    return container.server.log.read_text().count(f"adapter_loaded name={name}@")


# -- selection ---------------------------------------------------------------------------------------------------------


def test_every_schema_takes_an_adapter(container: Container, texts: dict[str, str]) -> None:
    """Chats, completions and streams are the adapter's, too."""
    headers, sampling = {ADAPTER: "poet"}, {"max_tokens": 10, "temperature": 0}
    completion = container.http.post("/invocations", json={"prompt": PROMPT} | sampling, headers=headers)
    assert completion.json()["choices"][0]["text"] == texts["poet"]
    told = rows(container.http.post("/invocations", json=BODY | {"stream": True}, headers=headers))
    assert told[-1]["generated_text"] == texts["poet"]
    chat: Any = {"messages": [{"role": "user", "content": PROMPT}]} | sampling
    of_poet = container.http.post("/invocations", json=chat, headers=headers).json()
    of_base = container.http.post("/invocations", json=chat).json()
    assert of_poet["model"] == "poet" and of_base["model"] == "lmi"
    assert of_poet["choices"][0]["message"]["content"] != of_base["choices"][0]["message"]["content"]


def test_an_adapter_that_is_broken_says_why(container: Container) -> None:
    """A directory that is no adapter keeps nobody from starting; its callers are told what it lacks."""
    error = the_error(container.http.post("/invocations", json=BODY, headers={ADAPTER: "torn"}), 404)
    assert "adapter_config.json" in error["message"]


# -- life --------------------------------------------------------------------------------------------------------------


def test_an_adapter_comes_and_goes(container: Container, texts: dict[str, str], name: str) -> None:
    """Registered, listed, described, used, updated, deleted; each by SageMaker's and by LMI's path."""
    for prefix in ("", "/models/lmi"):
        made = container.admin.post(f"{prefix}/adapters", params={"name": name, "src": "legal"})
        assert made.json() == {"status": f"Adapter {name} registered"}
        the_error(container.admin.post(f"{prefix}/adapters", json={"name": name, "src": "poet"}), 409)
        assert name in [one["name"] for one in container.http.get(f"{prefix}/adapters").json()["adapters"]]
        assert container.generate(PROMPT, headers={ADAPTER: name}) == texts["legal"]
        assert container.admin.post(f"{prefix}/adapters/{name}/update", json={"src": "poet"}).status_code == 200
        assert container.generate(PROMPT, headers={ADAPTER: name}) == texts["poet"]
        described = container.http.get(f"{prefix}/adapters/{name}").json()
        assert described.items() >= {"name": name, "src": "poet", "preload": True, "pin": False}.items()
        assert container.admin.delete(f"{prefix}/adapters/{name}").status_code == 200
        the_error(container.http.get(f"{prefix}/adapters/{name}"), 404)
        the_error(container.http.post("/invocations", json=BODY, headers={ADAPTER: name}), 404)


# -- the lazy promise --------------------------------------------------------------------------------------------------


async def test_weights_that_can_not_be_loaded(container: Container, texts: dict[str, str]) -> None:
    """An adapter whose registration found nothing wrong and that the engine refuses at its first use.

    Everyone who asks for it, at once or later, however they ask, gets an error with its name and the cause, and nobody
    the base model's answer; the server and the other adapters go on. With other weights it answers.
    """
    with container.adapter("unfit", like="poet") as directory:
        weights = load_file(directory / WEIGHTS)
        save_file({name.replace("q_proj", "zz_proj"): data for name, data in weights.items()}, directory / WEIGHTS)
        changed = container.admin.post("/adapters/unfit/update", json={"preload": False})
        assert changed.status_code == 200, changed.text
        named = {"headers": {ADAPTER: "unfit"}}
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/invocations", {"json": BODY} | named),
            ("/invocations", {"json": BODY | {"stream": True}} | named),
            ("/invocations", {"json": BODY | {"adapters": "unfit"}}),
            ("/invocations", {"json": {"prompt": PROMPT}} | named),
            ("/v1/completions", {"json": {"prompt": PROMPT, "model": "unfit", "stream": True}}),
        ]
        async with httpx.AsyncClient(base_url=container.server.url, timeout=60) as http:
            replies = await asyncio.gather(*(http.post(path, **request) for path, request in asked))
            replies += [await http.post(path, **request) for path, request in asked]
        for reply in replies:
            message = the_error(reply, 500)["message"]
            assert "'unfit' can't be loaded" in message and "zz_proj" in message
        assert container.http.get("/adapters/unfit").json()["loaded"] is False
        assert container.generate(PROMPT, headers={ADAPTER: "legal"}) == texts["legal"]
        assert container.generate(PROMPT) == texts[""]
        assert container.admin.post("/adapters/unfit/update", json={"src": "poet"}).status_code == 200
        assert container.generate(PROMPT, headers={ADAPTER: "unfit"}) == texts["poet"]
