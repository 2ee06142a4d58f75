"""`hotspan trace record`: what its command line asks, prints and writes."""

import http.server
import json
import socket
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.cli import admin_client
from hotspan.cli.collecting import collect
from hotspan.cli.main import app
from hotspan.core.errors import ConfigError, NoAnswerError, RefusedError

ROW = {"timestamp": 5, "input_length": 600, "output_length": 2, "hash_ids": [1, 2], "cached_length": 300}


@pytest.fixture(autouse=True)
def handled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signals' handlers stay those of the tests, and a second passes at once."""
    now = [0.0]
    simulated = partial(collect, clock=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr("hotspan.cli.trace.signal.signal", lambda *_: None)
    monkeypatch.setattr("hotspan.cli.trace.collect", simulated)


def answers(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[tuple[str, float]]:
    """What each call asks, and for how long."""
    asked: list[tuple[str, float]] = []

    def post(self: admin_client.Admin, path: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
        asked.append((self.address, timeout_s))
        return answer

    monkeypatch.setattr(admin_client.Admin, "post", post)
    return asked


def record(*words: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["trace", "record", *map(str, words), "--seconds", "1"])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_a_recording_asks_the_server_that_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """At each fetch, whatever others start; and no longer than the recordings of other servers go on."""
    asked = answers(monkeypatch, {"rows": [ROW], "running": 0, "dropped": 0})
    found = iter(("http://first", "http://second", "http://third"))
    monkeypatch.setattr(admin_client.Admin, "_find", lambda *_: next(found))
    status, output = record(tmp_path / "trace.jsonl")
    assert status == 0 and "2 requests, hit rate 50.0%" in output, output
    assert {address for address, _ in asked} == {"http://first"} and len(asked) == 2
    assert all(timeout_s < 30 for _, timeout_s in asked)


def test_warming_asks_the_server_that_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With the key of a tenant, too."""
    (tmp_path / "text").write_text("a text")
    asked: list[str] = []

    def get(self: admin_client.Admin, path: str) -> Any:
        asked.append(self.address)
        raise ConfigError("enough")

    found = iter(("http://first", "http://second"))
    monkeypatch.setattr(admin_client.Admin, "_find", lambda *_: next(found))
    monkeypatch.setattr(admin_client.Admin, "get", get)
    done = CliRunner().invoke(app, ["cache", "warm", str(tmp_path / "text"), "--api-key", "k"])
    assert "enough" in done.output and asked == ["http://first"]


@pytest.mark.parametrize("answer", [{"ok": 1}, [1], {"rows": [{}], "running": 0, "dropped": 0}])
def test_the_answer_of_another_server_is_one_line(answer: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And no traceback; nothing is written."""
    answers(monkeypatch, answer)
    status, output = record(tmp_path / "trace.jsonl", "--server", "http://x:1")
    assert status == 2 and "http://x:1 does not answer as hotspan does" in output
    assert not (tmp_path / "trace.jsonl").exists()


def test_what_can_not_be_written_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On a full disk: in a temporary file, which the line names."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answers(monkeypatch, {"rows": [ROW], "running": 0, "dropped": 0})
    status, output = record("/dev/full", "--server", "http://x:1")
    (kept,) = tmp_path.iterdir()
    assert status == 2 and "/dev/full can't be written (No space left on device)" in output
    assert str(kept) in output.replace("\n", "") and len(kept.read_text().splitlines()) == 2
    assert json.loads(kept.read_text().splitlines()[0])["hash_ids"] == [1, 2]


def test_what_can_be_written_nowhere_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Which names both reasons."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    answers(monkeypatch, {"rows": [ROW], "running": 0, "dropped": 0})
    status, output = record("/dev/full", "--server", "http://x:1")
    assert status == 2 and "nor a temporary file (No such file or directory)" in output


def test_an_interruption_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With whose it was."""
    ages = iter((5.0, 0.0))

    def post(self: admin_client.Admin, path: str, body: dict[str, Any], timeout_s: float = 60) -> Any:
        return {"rows": [ROW], "running": 0, "dropped": 0, "age_s": next(ages)}

    monkeypatch.setattr(admin_client.Admin, "post", post)
    status, output = record(tmp_path / "trace.jsonl", "--server", "http://x:1")
    assert status == 0 and "recording of http://x:1 was interrupted: requests are missing" in output


class Unavailable(http.server.BaseHTTPRequestHandler):
    """Answers 503."""

    def do_GET(self) -> None:
        self.send_error(503)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def unavailable() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Unavailable) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_what_may_answer_later_is_told_apart(unavailable: str) -> None:
    """A 503 and no answer in time, from a server that can't be reached."""
    with pytest.raises(RefusedError) as refused:
        admin_client.Admin(server=unavailable, token="t" * 16).get("/hotspan/cache")
    assert refused.value.status == 503
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(NoAnswerError, match="can't be asked"):
            admin_client.Admin(server=url, token="t" * 16).get("/hotspan/cache", timeout_s=0.05)
    with pytest.raises(ConfigError, match="can't be asked") as gone:
        admin_client.Admin(server=url, token="t" * 16).get("/hotspan/cache")
    assert not isinstance(gone.value, NoAnswerError)
