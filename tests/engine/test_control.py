"""Administration of an engine that hotspan does not serve: of `LLM()` in this process, and of `vllm serve`."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import hotspan
from hotspan.cli.admin_client import Admin
from hotspan.cli.collecting import collect
from hotspan.cli.trace import write_rows
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.core.trace import read
from kit.engine import CHUNK, rig
from kit.ports import free_port
from kit.waiting import until

from .test_plugin import HANG_S, PROMPT, asked, vllm_serving

pytestmark = pytest.mark.engine

TOKEN = "a-token-of-the-administrator"
LENGTH = 900
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's engines have their sockets, whose paths must be short."""
    with tempfile.TemporaryDirectory(prefix="run", dir="/tmp") as directory:
        monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
        yield Path(directory) / "hotspan"


def test_an_llm_is_administered_by_python_calls(tiny_model: Path, tmp_path: Path, runtime: Path) -> None:
    """`hotspan.control(llm)`: what is invalidated is computed anew, with the same answer; nothing else is."""
    with rig(tiny_model, disk=tmp_path / "disk", cache={"is_served": False}) as engine:
        control = hotspan.control(engine.llm)
        one, other = engine.text(1, LENGTH), engine.text(2, LENGTH)
        answers = [engine.ask(text, 4, tags=[tag]).tokens for text, tag in ((one, "one"), (other, "other"))]
        engine.settle()
        (replica,) = control.stats()["replicas"]
        assert replica["tiers"]["ram"]["tenants"] == {"default": 2 * WHOLE // CHUNK}

        found = control.lookup(prompt=one)["replicas"][0]
        assert found["found"]["ram"]["tokens"] == found["asked"]["tokens"] == WHOLE, found
        assert control.lookup(prompt=engine.text(3, LENGTH))["replicas"][0]["found"] == {}
        receipt = control.invalidate(tokens=one)
        assert receipt["is_durable"] and receipt["removed"]["disk_chunks"] == WHOLE // CHUNK, receipt
        found = [engine.ask(text, 4) for text in (one, other)]
        assert [each.tokens for each in found] == answers
        assert [each.cached for each in found] == [0, LENGTH // 128 * 128]

        assert control.invalidate(tags=["other"])["removed"]["disk_chunks"] == WHOLE // CHUNK
        assert engine.ask(other, 4).cached == 0
        (told, *_) = control.explain()
        assert [part["reason"] for part in told["computed"]] == ["invalidated", "tail"], told
        assert control.explain(told["request"]) == [told] and not control.explain("another")
        assert control.check()["replicas"][0]["tiers"]["disk"]["corrupt"] == {}
        assert control.pin(["one"], 0.01)["replicas"][0]["bytes"] > 0
        assert control.prefetch(tags=["one"])["replicas"]
        control.clear()
        assert engine.ask(one, 4).cached == 0
        with pytest.raises(RefusedError, match="no keys"):
            control.shred("default")
    assert not list(runtime.iterdir())


def is_controlled_as_by_lmcache(command: Callable[..., tuple[int, str]], prompt: Path) -> None:
    """LMCache's lookup, pin, move and health, beside an engine that has the prompt in RAM; clear is below."""
    status, said = command("lookup", "--prompt-file", str(prompt), "--json")
    (replica,) = json.loads(said)["replicas"]
    assert status == 0 and replica["found"]["ram"]["tokens"] == replica["asked"]["tokens"] > 0, said
    nothing = prompt.with_name("nothing")
    nothing.write_text("Nobody has asked this. " * 100)
    status, said = command("lookup", "--prompt-file", str(nothing))
    assert status == 1 and "none" in said, said
    status, said = command("pin", "--tag", "manual", "--gib", "0.01")
    assert status == 0 and "pinned: manual" in said, said
    status, said = command("prefetch", "--prompt-file", str(prompt))
    assert status == 0 and "moved into RAM" in said, said
    status, said = command("health")
    assert status == 0 and "ram up, disk up" in said, said


def is_recorded(url: str, model: Path, path: Path, file: Path) -> None:
    """`hotspan trace record` at the engine's own socket: what is asked meanwhile is in the file."""
    cached = []

    def asks(_: float) -> None:
        cached.append(asked(url, model)[1])
        if len(cached) == 3:
            raise KeyboardInterrupt

    found = collect({"the engine": Admin(server=f"unix:{path}").post}, 600, sleep=asks)
    assert not found.silent and not found.interrupted
    write_rows(file, found.rows, found.servers)
    assert [row["cached_length"] for row in found.rows] == cached and len(cached) == 3 and all(cached), found
    (trace, (server,)) = read(file), found.servers
    assert {request.answer_tokens for request in trace.requests} == {8}
    assert server["model"] == str(model) and server["gpu_tokens"] and server["tier_bytes"]["ram"], server


def is_warmed(url: str, command: Callable[..., tuple[int, str]], texts: Path) -> None:
    """`hotspan cache warm` computes documents at vLLM's own port, and finds them again; not at the engine's socket."""
    texts.mkdir()
    for number in range(2):
        (texts / f"{number}.txt").write_text(f"Document {number} of two. " * 80)
    for turn in range(2):
        status, said = command("warm", str(texts), "--server", url, "--json")
        done = json.loads(said)
        assert status == 0 and done["texts"] == 2 and done["bytes"], said
        assert done["cached"] > done["tokens"] - 2 * CHUNK if turn else not done["cached"], said
    status, said = command("warm", str(texts))
    assert status == 2 and "give --server URL" in said, said


def is_seen_when_it_stops(url: str, model: str, path: Path) -> None:
    """An engine core that is stopped while a request is in work: /health is 503 and its socket is known to be stalled,
    until it goes on.
    """
    core = psutil.Process(int(path.name.split("-")[1]))
    (core,) = [each for each in core.children(recursive=True) if "EngineCore" in " ".join(each.cmdline())]
    body = {"model": model, "prompt": "once", "max_tokens": 900, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        next(lines)
        core.suspend()
        try:
            until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 503, within_s=HANG_S)
            assert "1 s" in httpx.get(f"{url}/health", timeout=60).json()["reason"]
            with pytest.raises(ConfigError, match=rf"stalled: process {core.pid} \(stopped\)"):
                Admin(server=f"unix:{path}").get("/hotspan/cache", timeout_s=0.2)
        finally:
            core.resume()
        assert [*lines][-1] == "data: [DONE]"
    until(lambda: httpx.get(f"{url}/health", timeout=60).status_code == 200, within_s=HANG_S)


def test_vllm_serve_is_administered_by_the_command_line(tiny_model: Path, tmp_path: Path, runtime: Path) -> None:
    """`hotspan cache` finds the engine by itself; asked at vLLM's own port it says where the engine is."""
    tiers = {"hotspan.ram_gib": 0.25, "hotspan.disk": str(tmp_path / "disk"), "hotspan.disk_gib": 1}
    at = f"http://127.0.0.1:{free_port()}"
    tiers["hotspan.admin_address"] = at.removeprefix("http://")
    config = {"kv_connector": "HotspanConnector", "kv_role": "kv_both", "kv_connector_extra_config": tiers}

    def command(*words: str) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-m", "hotspan", "cache", *words], capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def stats() -> Any:
        status, said = command("stats", "--json")
        assert status == 0, said
        (replica,) = json.loads(said)["replicas"]
        return replica["tiers"]

    log = tmp_path / "log"
    middleware = ("--middleware", "hotspan.server.step_health.StepHealth")
    variables = {
        "XDG_RUNTIME_DIR": str(runtime.parent),
        "HOTSPAN_STEP_TIMEOUT_S": "1",
        "HOTSPAN_ADMIN_TOKEN": TOKEN,
    }
    with vllm_serving(tiny_model, config, log, *middleware, **variables) as url:
        assert stats()["ram"]["chunks"] == 0, log.read_text()[-2000:]  # before any request
        answer, _ = asked(url, tiny_model)
        cached = asked(url, tiny_model)[1]
        assert cached > 0 and stats()["ram"]["chunks"] > 0
        prompt = tmp_path / "prompt"
        prompt.write_text(PROMPT)
        is_controlled_as_by_lmcache(command, prompt)
        wrong = {"model": str(tiny_model), "prompt": "once", "max_tokens": 1, "kv_transfer_params": {"ttl": "soon"}}
        told = httpx.post(f"{url}/v1/completions", json=wrong, timeout=60).json()["kv_transfer_params"]
        assert "soon" in told["refused"], told
        for words in (("--server", at), ("--server", at, "--token", TOKEN)):
            status, said = command("lookup", "--prompt-file", str(prompt), *words)
            assert (status == 0) is ("--token" in words), said
        status, said = command("invalidate", "--prompt-file", str(prompt))
        assert status == 0 and "durable on" in said, said
        assert stats()["disk"]["chunks"] == 0, said
        assert asked(url, tiny_model) == (answer, 0)
        status, said = command("stats", "--server", url)
        assert status != 0 and "--server unix:" in said.replace("\n", ""), said
        is_recorded(url, tiny_model, next(runtime.iterdir()), tmp_path / "trace.jsonl")
        is_warmed(url, command, tmp_path / "texts")
        is_seen_when_it_stops(url, str(tiny_model), next(runtime.iterdir()))
    assert not list(runtime.iterdir())
