"""An engine core that is really stopped: health checks are 503 until it goes on."""

import signal
import time
from pathlib import Path

import httpx
import psutil
import pytest

from .conftest import Server, serving

pytestmark = pytest.mark.engine


def cores(server: Server) -> list[psutil.Process]:
    """The processes that step."""
    below = psutil.Process(server.process.pid).children(recursive=True)
    return [process for process in below if "EngineCore" in " ".join(process.cmdline())]


def until(server: Server, status: int) -> httpx.Response:
    """The first answer to a health check that has this status."""
    deadline = time.monotonic() + 120
    while (answer := httpx.get(server.url + "/ping", timeout=60)).status_code != status:
        assert time.monotonic() < deadline, f"/ping stays {answer.status_code}"
        time.sleep(0.05)
    return answer


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_stopped_engine_core_is_seen(replicas: int, tiny_model: Path, tmp_path: Path) -> None:
    """With a request in work: 503 with the reason until it steps; the answer is complete. One of two is enough."""
    options = ("--ram-gib", "0.1", "--step-timeout-s", "1", "--data-parallel-size", str(replicas))
    with serving(tiny_model, tmp_path / "log", *options) as server:
        found = cores(server)
        assert len(found) == replicas
        body = {"model": server.model, "prompt": "once", "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
            lines = (line for line in answer.iter_lines() if line.startswith("data: "))
            next(lines)
            found[-1].send_signal(signal.SIGSTOP)
            try:
                ill = until(server, 503)
                assert ill.json()["status"] == "Stalled" and "1 s" in ill.json()["reason"]
                assert httpx.get(server.url + "/health", timeout=60).status_code == 503
            finally:
                found[-1].send_signal(signal.SIGCONT)
            assert [*lines][-1] == "data: [DONE]"
        until(server, 200)
        assert httpx.get(server.url + "/health", timeout=60).status_code == 200
        log = (tmp_path / "log").read_text()
        assert "engine_stalled" in log and "engine_steps_again" in log
        assert "engine_progress_not_told" not in log, "each core has hotspan's plugin"
