"""A server of embeddings: what `inputs` means there; and how a server ends whose engine has died, at last."""

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from .rig import Container
from .rig import container as serving

pytestmark = pytest.mark.engine

VARIABLES = {
    "OPTION_TASK": "text_embedding",
    "OPTION_NORMALIZE": "false",
    "OPTION_DTYPE": "fp32",
    "OPTION_MAX_MODEL_LEN": "2048",
    "OPTION_BLOCK_SIZE": "128",
    "OPTION_NUM_GPU_BLOCKS_OVERRIDE": "64",
    "OPTION_GPU_MEMORY_UTILIZATION": "0.2",
    "OPTION_ENFORCE_EAGER": "true",
    "HOTSPAN_RAM_GIB": "0.1",
}
TEXTS = ["Where does the river begin?", "Once"]
GONE_S = 60


@pytest.fixture(scope="module")
def embedding(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    with serving(tmp_path_factory.mktemp("embedding"), VARIABLES | {"HF_MODEL_ID": str(tiny_model)}) as running:
        yield running


def vectors(container: Container, inputs: object, **parameters: Any) -> Any:
    """What `inputs` are answered with."""
    reply = container.invoke({"inputs": inputs, "parameters": parameters})
    assert reply.status_code == 200, reply.text
    return reply.json()


def length(vector: list[float]) -> float:
    return math.hypot(*vector)


def near(vector: list[float]) -> Any:
    return pytest.approx(vector, rel=1e-3, abs=1e-3)


def test_inputs_are_embedded(embedding: Container) -> None:
    """A vector for a text, a list of them for a list, in its order; on all of LMI's routes, whatever else is there."""
    first, second = vectors(embedding, TEXTS)
    assert vectors(embedding, TEXTS[0]) == near(first) and vectors(embedding, [TEXTS[1]]) == [near(second)]
    assert first != near(second)
    for path in ("/predictions/lmi", "/models/lmi/invoke", "/endpoints/lmi/invocations"):
        assert embedding.invoke({"inputs": TEXTS[0]}, path).json() == near(first)
    assert embedding.invoke({"inputs": TEXTS[0], "prompt": "Say", "messages": []}).json() == near(first)


def test_normalize(embedding: Container) -> None:
    """option.normalize says how long vectors are, and a request may say otherwise."""
    plain, normal = vectors(embedding, TEXTS[0]), vectors(embedding, TEXTS[0], normalize=True)
    assert length(normal) == pytest.approx(1, abs=1e-3) and length(plain) > 2
    assert [value / length(plain) for value in plain] == near(normal)


def test_truncated_texts(embedding: Container) -> None:
    """truncate embeds the text's first tokens only, as many as it says."""
    ids = embedding.http.post("/tokenize", json={"model": "lmi", "prompt": TEXTS[0]}).json()["tokens"]
    expected = embedding.invoke({"input": ids[:2]}, "/v1/embeddings").json()["data"][0]["embedding"]
    assert vectors(embedding, TEXTS[0], truncate=2) == near(expected) != near(vectors(embedding, TEXTS[0]))


def test_openais_embeddings(embedding: Container) -> None:
    """/v1/embeddings, and the same body sent to /invocations, give OpenAI's client the same vectors."""
    answer = embedding.openai.embeddings.create(model="lmi", input=TEXTS)
    assert answer.model == "lmi" and answer.usage.prompt_tokens > len(TEXTS)
    expected = vectors(embedding, TEXTS)
    assert [row.embedding for row in answer.data] == [near(vector) for vector in expected]
    invoked = embedding.invoke({"input": TEXTS}).json()
    assert [row["embedding"] for row in invoked["data"]] == [near(vector) for vector in expected]


def test_an_engine_that_died(embedding: Container) -> None:
    """/ping says so soon and for good, nothing is answered any more, and the server ends by itself.

    The last test with this server: it kills its engine.
    """
    assert embedding.http.get("/ping").json() == {"status": "Healthy"}
    children = psutil.Process(embedding.server.process.pid).children(recursive=True)
    (core,) = [child for child in children if "EngineCore" in child.name()]
    core.kill()
    deadline = time.monotonic() + GONE_S
    said: list[tuple[int, Any]] = []
    while embedding.server.process.poll() is None:
        assert time.monotonic() < deadline, said
        with contextlib.suppress(httpx.TransportError):
            reply = embedding.http.get("/ping", timeout=5)
            said.append((reply.status_code, reply.json()["status"]))
            if reply.status_code != 200:
                assert embedding.invoke({"inputs": "Say"}).status_code >= 500
        time.sleep(0.05)
    statuses = [status for status, _ in said]
    assert statuses == sorted(statuses) and set(said) <= {(200, "Healthy"), (503, "Unhealthy"), (503, "Draining")}
    assert "hotspan: the engine died" in embedding.server.log.read_text()
    assert embedding.server.process.returncode == 2
