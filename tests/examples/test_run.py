"""The examples, run against a real server with keys, an adapter and its formatter. `make test-slow` runs them."""

import http.client
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest

from kit.ports import free_port

from ..docs.test_paths import BIN, ENVIRONMENT, HANG_S, SMALL, running

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOKEN = "a-token-of-the-examples"
EXAMPLES = Path(__file__).parents[2] / "examples"


class Served(NamedTuple):
    """A server, and the root of its adapters."""

    port: int
    adapters: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def python(*words: str, **variables: str) -> str:
    """What a script of the examples prints."""
    done = subprocess.run(
        [sys.executable, *words], env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`hotspan serve` without keys, with LoRA."""
    work = tmp_path_factory.mktemp("served")
    port, adapters = free_port(), work / "adapters"
    adapters.mkdir()
    words = f"{BIN}/hotspan serve {tiny_model} --ram-gib 0.5 --enable-lora --adapters {adapters} --port {port}"
    with running(" ".join([words, *SMALL]), port, work / "log", HOTSPAN_ADMIN_TOKEN=TOKEN):
        yield Served(port, adapters)


def tokens(text: str, line: str) -> int:
    """The number of cached tokens in a line."""
    (found,) = re.findall(rf"^{line}.*?(\d+)(?: tokens)? from the cache", text, re.MULTILINE)
    return int(found)


def test_rag(served: Served) -> None:
    """A document that changed is computed again, and the one before it is not."""
    text = python(str(EXAMPLES / "rag" / "rag.py"), served.url, HOTSPAN_ADMIN_TOKEN=TOKEN)
    assert tokens(text, "first question") == 0
    assert tokens(text, "second question") >= 512
    assert tokens(text, "old text after its change") < 256
    assert tokens(text, "new text again") >= 512
    assert tokens(text, "question about the news") >= 256


def test_agent(served: Served) -> None:
    """Each step but the first finds the last one's prompt."""
    text = python(str(EXAMPLES / "agent" / "agent.py"), served.url)
    found = [int(number) for number in re.findall(r"(\d+) from the cache", text)]
    assert len(found) == 4
    assert found[0] == 0 and min(found[1:]) >= 512


def test_multi_tenant(tiny_model: Path, tmp_path: Path) -> None:
    """Tenants hit and invalidate their own only."""
    file, port = tmp_path / "tenants.yaml", free_port()
    shutil.copy(EXAMPLES / "multi_tenant" / "tenants.yaml", file)
    file.chmod(0o600)
    words = f"{BIN}/hotspan serve {tiny_model} --ram-gib 0.5 --tenants {file} --port {port}"
    with running(" ".join([words, *SMALL]), port, tmp_path / "log"):
        text = python(str(EXAMPLES / "multi_tenant" / "tenants.py"), f"http://127.0.0.1:{port}")
    assert "status 401" in text
    assert (tokens(text, "acme, first"), tokens(text, "globex, the same text")) == (0, 0)
    assert tokens(text, "acme, again") >= 256
    assert tokens(text, "acme still has its own") >= 256


def test_lora(served: Served, tiny_model: Path) -> None:
    """The adapter is registered, and answers as its formatter says."""
    from kit.demo_adapter import make_demo_adapter

    make_demo_adapter(served.adapters / "support", tiny_model, seed=1)
    shutil.copy(EXAMPLES / "lora" / "support" / "formatter.yaml", served.adapters / "support")
    words = [str(EXAMPLES / "lora" / "register.sh"), "helper", "support", served.url]
    variables = ENVIRONMENT | {"HOTSPAN_ADMIN_TOKEN": TOKEN}
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert '"reply"' in done.stdout and '"adapter":"helper"' in done.stdout.replace(" ", "")


def test_notebook(served: Served, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells run, in their order, on two servers and a small volume; the report shows both."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    display = ModuleType("IPython.display")
    display.IFrame = lambda source, **size: Path(source)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    notebook = json.loads((EXAMPLES / "notebook" / "benchmark.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    alone, names = free_port(), dict[str, Any]()
    local = {
        "http://localhost:8080": f"http://127.0.0.1:{alone}",
        "http://localhost:8081": served.url,
        "VOLUME_GIB = 2 ": "VOLUME_GIB = 0.02 ",
        '"--quiet"]': '"--quiet", "--ldqa-document-length", "1000"]',
    }
    with running(
        " ".join([f"{BIN}/hotspan serve {tiny_model} --no-cache --port {alone}", *SMALL]), alone, tmp_path / "log"
    ):
        for cell in cells:
            for text, other in local.items():
                cell = cell.replace(text, other)
            exec(cell, names)
    assert set(names["results"]) == {"vLLM alone", "hotspan"}
    assert "<html" in (tmp_path / "report.html").read_text()


class Platform(BaseHTTPRequestHandler):
    """What SageMaker's runtime does with an invocation: hands it to an instance, with the session's headers."""

    port = 0

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=HANG_S)
        kept = {name: value for name, value in self.headers.items() if name.lower().startswith("x-amzn-sagemaker-")}
        connection.request("POST", "/invocations", body, {"content-type": "application/json", **kept})
        answer = connection.getresponse()
        content = answer.read()
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower().startswith("x-amzn-sagemaker-"):
                self.send_header(name, value)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: object) -> None:
        pass


def test_sagemaker(served: Served) -> None:
    """boto3's client opens a session, finds its text again, and closes it."""
    handler = type("Here", (Platform,), {"port": served.port})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        text = python(
            *(str(EXAMPLES / "sagemaker" / "client.py"), "llama", f"http://127.0.0.1:{server.server_port}"),
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="test",
            AWS_DEFAULT_REGION="eu-central-1",
        )
    finally:
        server.shutdown()
    first, second = (int(number) for number in re.findall(r"(\d+) from the cache", text))
    assert first == 0 and second >= 256
    assert re.search(r"^session (\S+)\n", text)[1] == re.search(r"^closed (\S+)", text, re.MULTILINE)[1]
