"""`hotspan serve STORE`: two real engines behind one port."""

import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from hotspan.bench.prose import prose
from hotspan.demo.model import make_demo_model
from kit.demo_adapter import make_demo_adapter
from kit.waiting import until
from tests.server.conftest import Server, serving

pytestmark = pytest.mark.engine

ADMIN_TOKEN = "the-token-of-who-runs-this"
ADMIN = {"authorization": f"Bearer {ADMIN_TOKEN}"}
TEXT = prose(3, 700)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A directory with an adapter and a serving.properties, and an archive of another model."""
    directory = tmp_path_factory.mktemp("several")
    first = make_demo_model(directory / "store" / "first", "tiny").path
    (first / "serving.properties").write_text("option.enable_lora=true\noption.served_model_name=premier\n")
    make_demo_adapter(first / "adapters" / "legal", first, 1)
    second = make_demo_model(directory / "packed" / "second", "tiny").path
    with tarfile.open(directory / "store" / "second.tar.gz", "w:gz") as pack:
        pack.add(second, "second")
    kek = ("--kek", f"file:{directory / 'kek'}")
    make = [sys.executable, "-m", "hotspan", "keys", "init", "--store", str(directory / "keys"), *kek, "--new-kek"]
    subprocess.run(make, check=True, capture_output=True)
    disk = ("--ram-gib", "0.2", "--disk", str(directory / "kv"), "--disk-gib", "0.5", *kek)
    disk += ("--key-store", str(directory / "keys"))
    variables = {"HOTSPAN_ADMIN_TOKEN": ADMIN_TOKEN, "XDG_CACHE_HOME": str(directory / "cache")}
    with serving(directory / "store", directory / "log", *disk, ready=False, variables=variables) as running:
        running.wait_until_ready(240)
        yield running


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_openai_client_uses_both(server: Server) -> None:
    """A stock client lists both with their adapters, and each answers by its name, in one piece and as a stream."""
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
    assert {"first", "premier", "second", "legal"} == {model.id for model in client.models.list()}
    messages = [{"role": "user", "content": "hello"}]
    for name in ("first", "premier", "second"):
        chat = client.chat.completions.create(model=name, messages=messages, max_tokens=4)
        assert chat.usage and chat.usage.completion_tokens == 4
        parts = list(client.chat.completions.create(model=name, messages=messages, max_tokens=4, stream=True))
        assert parts[-1].choices[0].finish_reason == "length"


def test_lmi_routes_adapters_and_sessions(http: httpx.Client) -> None:
    """LMI's routes reach the model of the path; an adapter is its own model's; a session is kept."""
    body = {"inputs": "A long time ago", "parameters": {"max_new_tokens": 8}}
    for name in ("first", "second"):
        for path in (f"/predictions/{name}", f"/models/{name}/invoke"):
            assert http.post(path, json=body).json()["generated_text"]
    named = {"X-Amzn-SageMaker-Adapter-Identifier": "legal"}
    plain = http.post("/predictions/first", json=body).json()
    tuned = http.post("/predictions/first", json=body, headers=named)
    assert tuned.status_code == 200 and tuned.json() != plain
    assert http.post("/predictions/second", json=body, headers=named).status_code == 404
    listed = http.get("/models/first/adapters").json()["adapters"]
    assert [adapter["name"] for adapter in listed] == ["legal"]
    opened = http.post("/predictions/second", json={"requestType": "NEW_SESSION"})
    assert opened.status_code == 200 and opened.headers["x-amzn-sagemaker-session-id"]


def test_each_has_its_tiers_and_forgets_with_the_other(server: Server, http: httpx.Client, tmp_path: Path) -> None:
    """Both cache in halves of one budget; an invalidation empties both and is one receipt; metrics have both."""

    def cached(name: str) -> int:
        body = {"model": name, "prompt": TEXT, "max_tokens": 1, "kv_transfer_params": {"tags": ["doc"]}}
        usage = http.post("/v1/completions", json=body).json()["usage"]
        return (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    for name in ("first", "second"):
        assert cached(name) == 0 and cached(name) >= 512
    stats = http.get("/hotspan/cache", headers=ADMIN).json()["replicas"]
    assert [replica["model"] for replica in stats] == ["first", "second"]
    slabs = sorted((server.log.parent / "kv").glob("*/slab"))
    assert [slab.parent.name for slab in slabs] == ["first", "second"]
    assert all(slab.stat().st_size <= 0.25 * 2**30 for slab in slabs)
    receipt = http.post("/hotspan/cache/invalidate", json={"tags": ["doc"]}, headers=ADMIN)
    assert receipt.status_code == 200 and receipt.json()["is_durable"], receipt.text
    assert set(receipt.json()["models"]) == {"first", "second"}
    assert cached("first") == cached("second") == 0
    page = http.get("/metrics", headers=ADMIN).text
    for name in ("first", "second"):
        assert f'hotspan_model_up{{model="{name}"}} 1.0' in page
        assert any(line.startswith("vllm:") and f'model="{name}"' in line for line in page.splitlines())


def test_each_model_s_disk_is_sealed_and_its_damage_costs_no_request(server: Server, http: httpx.Client) -> None:
    """Of both models nothing on disk can be read without the keys; once every frame is damaged, who asks for a text
    that left RAM gets the same answer, computed.
    """

    def answer(name: str, text: str) -> tuple[str, int]:
        body = {"model": name, "prompt": text, "max_tokens": 4, "temperature": 0}
        said = http.post("/v1/completions", json=body).raise_for_status().json()
        return said["choices"][0]["text"], (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0

    kept = prose(9, 700)
    first = {name: answer(name, kept) for name in ("first", "second")}

    def are_on_disk() -> bool:
        told = http.get("/hotspan/cache", headers=ADMIN).json()["replicas"]
        assert all(replica["is_encrypted"] for replica in told)
        return all(replica["tiers"]["disk"]["chunks"] >= 4 for replica in told)

    until(are_on_disk)
    for slab in (server.log.parent / "kv").glob("*/slab"):
        with slab.open("r+b") as file:
            for at in range(0, slab.stat().st_size, 1 << 10):
                file.seek(at)
                file.write(b"damaged")
    checked = http.post("/hotspan/cache/check", json={}, headers=ADMIN).json()["replicas"]
    assert all(sum(replica["tiers"]["disk"]["corrupt"].values()) for replica in checked), checked
    assert {name: answer(name, kept)[0] for name in first} == {name: text for name, (text, _) in first.items()}


def test_sigterm_ends_everything(server: Server, http: httpx.Client) -> None:
    """On SIGTERM the store ends with status 0 and leaves no process."""
    processes = psutil.Process(server.process.pid).children(recursive=True)
    assert len(processes) >= 4
    assert http.get("/ping").json() == {"status": "Healthy", "models": {"first": "Healthy", "second": "Healthy"}}
    assert server.stop() == 0
    assert psutil.wait_procs(processes, 60)[1] == []
