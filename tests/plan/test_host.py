"""Who answers on the daemon's port: real daemons, real strangers, nobody."""

import http.server
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotspan.l2.open import parse_store_url
from hotspan.plan import host as of_host
from hotspan.plan.disk import DiskProbe
from hotspan.plan.host import Answerer, Daemon, Host, find_daemon, usual_directories
from hotspan.plan.mounts import Medium

from ..daemon.rig import PATIENCE_S, DaemonProcess


class Stranger(http.server.BaseHTTPRequestHandler):
    """A server that knows nothing of the protocol, and answers everything with `answer`."""

    status, answer = 200, b"{}"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("content-length", str(len(self.answer)))
        self.end_headers()
        self.wfile.write(self.answer)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stranger() -> Iterator[int]:
    """The port of a web server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.fixture
def nothing(tmp_path: Path) -> Path:
    """A path where no daemon's shared memory is."""
    return tmp_path / "no-segment"


def test_hotspans_own_daemon_is_found(nothing: Path) -> None:
    """It says its name, and its url is one that --l2 takes."""
    daemon = DaemonProcess()
    daemon.start()
    try:
        found = find_daemon("127.0.0.1", daemon.port, PATIENCE_S, segment=nothing)
        assert found.who is Answerer.HOTSPAN
        assert found.url is not None and parse_store_url("--l2", found.url).port == daemon.port
    finally:
        daemon.close()


def test_nobody_answers(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A closed port, a name that there is not, and a port that there can't be are nobody, after two bounded tries."""
    connect, tries = socket.create_connection, list[float]()

    def tried(address: tuple[str, int], timeout: float = math.inf, *others: Any, **named: Any) -> socket.socket:
        tries.append(timeout)
        return connect(address, timeout, *others, **named)

    monkeypatch.setattr(socket, "create_connection", tried)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]  # bound, and does not listen
        for host, number in (("127.0.0.1", port), ("no-such-host.invalid", 9200), ("127.0.0.1", 99999), ("a" * 300, 1)):
            found = find_daemon(host, number, timeout_s=0.4, segment=nothing)
            assert (found.who, found.url) == (Answerer.NOBODY, None)
            assert tries == [0.4, 0.4]
            tries.clear()


@pytest.mark.parametrize(
    ("status", "answer"),
    [(200, {"cluster_name": "x"}), (200, {"status": "ok"}), (404, {"service": "hotspan-daemon"}), (200, [1])],
)
def test_a_stranger_is_no_l2(
    status: int, answer: object, stranger: int, nothing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers in other words, as Elasticsearch does on the same port, gets no KV."""
    monkeypatch.setattr(Stranger, "status", status)
    monkeypatch.setattr(Stranger, "answer", json.dumps(answer).encode())
    found = find_daemon("127.0.0.1", stranger, PATIENCE_S, segment=nothing)
    assert (found.who, found.url) == (Answerer.STRANGER, None)


def test_with_hyperpods_memory_it_is_hyperpods_daemon(stranger: int, tmp_path: Path) -> None:
    """A port that accepts, and the shared memory that the protocol reads through, are HyperPod's daemon."""
    segment = tmp_path / "ai_toolkit_cache"
    segment.write_bytes(b"x")
    found = find_daemon("127.0.0.1", stranger, PATIENCE_S, segment=segment)
    assert (found.who, found.url) == (Answerer.HYPERPOD, f"sagemaker-hyperpod://127.0.0.1:{stranger}")
    assert find_daemon("127.0.0.1", 1, segment=segment).who is Answerer.NOBODY, "memory without a port"


def test_one_that_never_answers_costs_its_time_limit(nothing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A port that accepts and stays silent is a stranger after the time that was given, the limit of each step."""
    real, told = socket.socket.settimeout, []

    def noted(of: socket.socket, limit_s: float) -> None:
        told.append(limit_s)
        real(of, limit_s)

    monkeypatch.setattr(socket.socket, "settimeout", noted)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        for timeout_s in (0.2, 0.1):
            found = find_daemon("127.0.0.1", silent.getsockname()[1], timeout_s=timeout_s, segment=nothing)
            assert found.who is Answerer.STRANGER
            assert told and set(told) == {timeout_s}
            told.clear()


def test_an_address_of_version_six_keeps_its_brackets(nothing: Path) -> None:
    """The address is one that a url can have."""
    assert find_daemon("::1", 1, segment=nothing).address == "[::1]:1"


@pytest.mark.parametrize("asked", [{}, {"is_measured": True}, {"is_measured": False}])
def test_disks_are_measured_unless_they_are_not_to_be(asked: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the directories that are named, and where none are named, of those where one usually is."""
    probed = []

    def probe(place: Path, *, is_measured: bool) -> DiskProbe:
        probed.append((place, is_measured))
        return DiskProbe(place, "ext4", Medium.NVME, 0, 0)

    monkeypatch.setattr(of_host, "probe_disk", probe)
    monkeypatch.setattr(of_host, "find_daemon", lambda *_: Daemon(Answerer.NOBODY, "", None))
    is_measured = asked.get("is_measured", True)
    Host.probe({}, [Path("/a"), Path("/b")], **asked)
    assert probed == [(Path("/a"), is_measured), (Path("/b"), is_measured)]
    probed.clear()
    Host.probe({}, (), **asked)
    assert not probed
    Host.probe({}, None, **asked)
    assert [place for place, _ in probed] == [*usual_directories({})]
