"""`hotspan daemon`: how it begins, what it says when it can't, and that it leaves nothing."""

import http.client
import signal
import socket
import subprocess
from contextlib import closing

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from kit.ports import free_port
from tests.daemon.rig import PATIENCE_S, DaemonProcess


@pytest.fixture
def unstarted() -> DaemonProcess:
    """A name and options; what starts it is up to the test."""
    return DaemonProcess()


def run(daemon: DaemonProcess, *options: str) -> tuple[int, str]:
    """Exit status and what was said on stderr of a daemon that can't start."""
    done = subprocess.run([*daemon.command(), *options], capture_output=True, text=True, timeout=60)
    assert done.stdout == ""
    return done.returncode, done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_leaves_nothing(unstarted: DaemonProcess, number: signal.Signals) -> None:
    """On SIGTERM or SIGINT it ends with status 0; its memory and its socket are gone."""
    unstarted.start()
    assert unstarted.segment.exists() and unstarted.unix_socket.exists()
    connection = socket.create_connection(("127.0.0.1", unstarted.port))
    assert unstarted.end(number) == 0
    assert not unstarted.segment.exists() and not unstarted.unix_socket.exists()
    connection.close()


def test_after_a_kill_it_starts_again(unstarted: DaemonProcess) -> None:
    """What a killed daemon left is replaced at the next start, with the same name and port."""
    unstarted.start()
    port = unstarted.port
    unstarted.stop()
    assert unstarted.segment.exists()
    unstarted.start()
    assert unstarted.port == port and unstarted.stats()["objects"] == 0
    unstarted.close()
    assert not unstarted.segment.exists()


def test_a_second_daemon_is_refused(daemon: DaemonProcess, unstarted: DaemonProcess) -> None:
    """A name or a port that a living daemon has is an error with status 2 that says which; the first goes on."""
    unstarted.port = daemon.port
    status, said = run(unstarted)
    assert status == 2 and f"127.0.0.1:{daemon.port} is taken" in said and "Traceback" not in said
    unstarted.port, unstarted.name = 0, daemon.name
    status, said = run(unstarted)
    assert status == 2 and "belongs to a daemon that runs" in said and "Traceback" not in said
    assert daemon.stats()["capacity_bytes"] > 0 and daemon.unix_socket.exists()


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (("--size-gib", "0"), "--size-gib"),
        (("--size-gib", "-1"), "--size-gib"),
        (("--size-gib", "nan"), "--size-gib"),
        (("--size-gib", "inf"), "--size-gib"),
        (("--size-gib", "1000000"), "lower --size-gib"),
        (("--port", "65536"), "--port 65536 is no port"),
        (("--host", "192.0.2.1"), "another --host"),
        (("--host", "no such host"), "another --host"),
        (("--shared-memory-name", "a/b"), "--shared-memory-name"),
        (("--mode", "abc"), "--mode"),
        (("--mode", "044"), "--mode"),
        (("--max-lease-s", "0"), "--max-lease-s"),
        (("--max-lease-s", "1.5"), "at least the 2 that"),
    ],
)
def test_what_can_not_work_is_said(unstarted: DaemonProcess, options: tuple[str, ...], hint: str) -> None:
    """Each is one line that names the option, status 2, and nothing is left behind."""
    of = ["daemon", "--port", "0", "--size-gib", "0.01", "--shared-memory-name", unstarted.name, *options]
    done = CliRunner().invoke(app, of)
    assert done.exit_code == 2 and hint in done.output and "Traceback" not in done.output
    assert not unstarted.segment.exists() and not unstarted.unix_socket.exists()


def test_names_of_other_machines_are_refused_unless_they_are_given() -> None:
    """A `Host` that is no name of this machine is 421, but for those of --allowed-host."""
    with closing(DaemonProcess(options=("--allowed-host", "kv.example", "--allowed-host", "other.example"))) as daemon:
        daemon.start()
        for host, status in (("kv.example", 200), ("OTHER.example:9200", 200), ("evil.example", 421)):
            connection = http.client.HTTPConnection("127.0.0.1", daemon.port, timeout=PATIENCE_S)
            connection.request("GET", "/health", headers={"host": host})
            assert connection.getresponse().status == status
            connection.close()


def test_other_machines_are_warned_of() -> None:
    """Listening on more than loopback says that nobody needs a key, and stats say so, too; the mode is as given."""
    daemon = DaemonProcess(options=("--host", "0.0.0.0", "--mode", "660"))
    with_errors = subprocess.Popen(daemon.command(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert with_errors.stdout is not None and with_errors.stderr is not None
    line = with_errors.stdout.readline()
    daemon.port = int(line.split("http://")[1].split()[0].rpartition(":")[2])
    assert daemon.stats()["is_exposed"] == 1
    assert daemon.segment.stat().st_mode & 0o777 == 0o660 == daemon.unix_socket.stat().st_mode & 0o777
    with_errors.terminate()
    _, said = with_errors.communicate(timeout=PATIENCE_S)
    assert "no authentication" in said


def test_monitors_have_a_port_of_their_own() -> None:
    """At --metrics-port are figures and health, and nothing of what is cached can be read, written or deleted."""
    port = free_port()
    with closing(DaemonProcess(options=("--metrics-port", str(port)))) as daemon:
        daemon.start()
        assert daemon.request("PUT", "/v1/kv/b/k", b"value")[0] == 200
        monitor = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

        def ask(method: str, target: str, body: bytes | None = None) -> tuple[int, bytes]:
            monitor.request(method, target, body)
            answer = monitor.getresponse()
            return answer.status, answer.read()

        assert ask("GET", "/metrics")[0] == ask("GET", "/health")[0] == 200
        assert b"hotspan_daemon_" in ask("GET", "/metrics?x")[1]
        for method, target in (
            ("PUT", "/v1/kv/b/other"),
            ("POST", "/v1/kv/b/k/leases"),
            ("DELETE", "/v1/kv/b/k"),
            ("GET", "/v1/stats"),
            ("POST", "/metrics"),
        ):
            assert ask(method, target, b"" if method == "PUT" else None)[0] == 404, (method, target)
        assert daemon.stats()["objects"] == 1
        monitor.close()
