"""`hotspan route`: what it takes, what it refuses, and how it ends."""

import hashlib
import http.client
import os
import re
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.config.options import options_of
from hotspan.core.errors import ConfigError
from hotspan.router.routes import Route, route_of
from hotspan.router.settings import Replica, RouterSettings, parse_replica, parse_shares
from hotspan.router.types import Strategy

URL = "http://10.0.0.1:8080"


def settings_of(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[RouterSettings | None, str]:
    """What a command line starts the router with, or what it says instead."""
    found: list[RouterSettings] = []
    monkeypatch.setattr("hotspan.router.run.run_router", lambda settings: found.append(settings))
    result = CliRunner().invoke(app, ["route", *words])
    return (found[0] if found else None), result.output


def test_flags_become_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas, groups, shares and numbers arrive as they were typed."""
    words = ("--replica", URL, "--replica", "new=10.0.0.2:8080,events=tcp://10.0.0.2:5557", "--split", "new=5%")
    got, said = settings_of(
        monkeypatch, *words, "--strategy", "prefixaware", "--max-in-flight", "7", "--expose", "--threshold", "3"
    )
    assert got is not None, said
    assert got.replicas == (Replica(URL), Replica("http://10.0.0.2:8080", "new", "tcp://10.0.0.2:5557"))
    assert got.shares == {"new": 0.05} and got.strategy is Strategy.PREFIXAWARE
    assert got.max_in_flight == 7 and got.is_exposing and got.threshold == 3


SAMPLES: dict[str, str] = {
    "host": "127.0.0.2",
    "replica": "10.0.0.9:8080",
    "strategy": "session",
    "split": "new=5%",
    "tenants": "FILE",
    "api_keys_file": "KEYS",
    "admin_token_file": "TOKEN",
    "health_path": "/health",
    "kv_events_key": "EVENTS",
    "shadow": "new=10%",
    "max_drift": "7%",
}
ALONE = {"threshold": "--strategy auto has no threshold"} | dict.fromkeys(
    ("max_drift", "shadow_in_flight"), "no --shadow is given"
)
"""What has no effect beside nothing else, and why."""


KINDS = {option.name: option.kind for option in options_of(RouterSettings)}


@pytest.mark.parametrize("name", KINDS)
def test_each_option_acts_or_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """Every option of the file changes what the router is started with; --insecure lets it start at all."""
    texts = {
        "FILE": 'tenants: {acme: {keys: ["key-of-acme"]}}',
        "KEYS": "key-of-acme",
        "TOKEN": "0123456789abcdef",
        "EVENTS": 32 * "k",
    }
    text = SAMPLES.get(name, "7")
    if text in texts:
        path = tmp_path / text
        path.write_text(texts[text])
        path.chmod(0o600)
        text = str(path)
    is_switch = KINDS[name].name == "true or false"
    word = ("--" + name.replace("_", "-"), *(() if is_switch else (text,)))
    base = ("--replica", f"{URL},events=tcp://10.0.0.1:5557", "--replica", "new=10.0.0.2:8080")
    if name == "insecure":
        base = (*base, "--host", "0.0.0.0")
    before, _ = settings_of(monkeypatch, *base)
    after, said = settings_of(monkeypatch, *base, *word)
    assert after is not None and after != before, said
    flag = word[0]
    assert said == (f"hotspan: {flag} has no effect: {ALONE[name]}\n" if name in ALONE else "")


def test_options_without_effect_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Retries of a router that makes none are named, from the file as well; nothing is said where they act."""
    file = tmp_path / "route.yaml"
    file.write_text(f"replica: {URL}\nattempts: 1\nretry-share: 0.5\n")
    _, said = settings_of(monkeypatch, "--config", str(file), "--retry-reserve", "9")
    assert all(
        f"--{name} has no effect: --attempts 1 disables retries" in said for name in ("retry-share", "retry-reserve")
    )
    _, said = settings_of(
        monkeypatch, "--replica", URL, "--retry-share", "0.5", "--strategy", "kvaware", "--threshold", "3"
    )
    assert said == ""


def test_the_file_is_below_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A YAML file gives what was not typed, with - or _ in names, and one text for a list of one."""
    file = tmp_path / "route.yaml"
    file.write_text(f"replica: {URL}\nqueue-size: 5\nqueue_timeout_s: 2\nstrategy: session\nexpose: true\n")
    got, said = settings_of(monkeypatch, "--config", str(file), "--queue-size", "9")
    assert got is not None, said
    assert (got.replicas, got.queue_size, got.queue_timeout_s) == ((Replica(URL),), 9, 2.0)
    assert got.strategy is Strategy.SESSION and got.is_exposing


def test_an_empty_text_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty value of an option that has no default, such as an unset variable, is none; keys are not left out."""
    got, said = settings_of(monkeypatch, "--replica", URL, "--session-key", "", "--otlp-endpoint", "")
    assert got is not None and got.session_key is None and got.otlp_endpoint is None, said
    for flag in ("--api-keys-file", "--tenants", "--host"):
        got, said = settings_of(monkeypatch, "--replica", URL, flag, "")
        assert got is None and f"{flag} is '': give" in said


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("replica: http://a:1\nstrategie: auto\n", "did you mean strategy?"),
        ("replica: http://a:1\nqueue_size: many\n", "a whole number"),
        ("replica:\n  a: 1\n", "a list of texts"),
        ("replica: http://a:1\nqueue_size: 1\nqueue_size: 2\n", "twice"),
    ],
)
def test_files_that_are_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, wanted: str) -> None:
    """An unknown name, a wrong type or a name written twice is an error that names the line and the remedy."""
    file = tmp_path / "route.yaml"
    file.write_text(text)
    got, said = settings_of(monkeypatch, "--config", str(file))
    assert got is None and wanted in " ".join(said.split()) and "route.yaml:" in said.replace("\n", "")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), "give --replica URL"),
        (("--replica", "ftp://x"), "is no URL of a server"),
        (("--replica", URL + "/v1"), "scheme, host and port alone"),
        (("--replica", URL, "--replica", URL), "given twice"),
        (("--replica", URL, "--strategy", "prefix-aware"), "did you mean prefixaware?"),
        (("--replica", URL, "--split", "new=10%"), "no replica is in that group"),
        (("--replica", f"new={URL}", "--split", "new=10%"), "no replica takes the rest"),
        (("--replica", f"new={URL}", "--split", "new=110%"), "its share of the sessions"),
        (("--replica", URL, "--max-in-flight", "0"), "above 0"),
        (("--replica", URL, "--threshold", "0"), "above 0"),
        (("--replica", f"{URL},event=tcp://x:1"), "come events= and replay="),
        (("--replica", URL, "--host", "0.0.0.0"), "lets other machines in"),
        (("--replica", URL, "--health-path", "ping"), "give a path"),
    ],
)
def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], wanted: str) -> None:
    """What can't work ends with one sentence that says what to write."""
    got, said = settings_of(monkeypatch, *words)
    assert got is None and wanted in " ".join(said.split())


def test_other_machines_need_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beyond loopback, keys of a private file or --insecure are needed; keys are held as digests and not shown."""
    file = tmp_path / "keys"
    digest = hashlib.sha256(b"sk-two").hexdigest()
    file.write_text(f"# clients\nsk-one\nsha256:{digest}\n")
    words = ("--replica", URL, "--host", "0.0.0.0", "--api-keys-file", str(file))
    file.chmod(0o644)
    got, said = settings_of(monkeypatch, *words)
    assert got is None and "chmod 600" in " ".join(said.split())
    file.chmod(0o600)
    got, said = settings_of(monkeypatch, *words)
    assert got is not None, said
    assert set(got.keys) == {hashlib.sha256(key).digest() for key in (b"sk-one", b"sk-two")}
    assert "sk-one" not in repr(got)
    assert settings_of(monkeypatch, "--replica", URL, "--host", "0.0.0.0", "--insecure")[0] is not None


def test_replicas_and_shares_are_parsed() -> None:
    """Scheme and case are settled, IPv6 works, and shares may be parts or percent."""
    assert parse_replica("Host:80").url == "http://host:80"
    assert parse_replica("https://[::1]:9/").url == "https://[::1]:9"
    assert parse_shares(["a=10%", "b=0.25"]) == {"a": 0.1, "b": 0.25}
    for wrong in ("=http://a:1", "a/b=http://a:1", "http://a:99999", "http://u:p@a:1", ""):
        with pytest.raises(ConfigError):
            parse_replica(wrong)


def test_unknown_writes_go_to_all() -> None:
    """What computes goes to one replica, what only reads to any, and any other method to all of them."""
    assert route_of("POST", "/v1/chat/completions") is route_of("POST", "/models/m/invoke") is Route.WORK
    assert route_of("GET", "/v1/models") is route_of("POST", "/tokenize") is Route.ONE
    assert route_of("POST", "/v1/responses/resp_1/cancel") is Route.ONE
    for path in ("/adapters", "/models/m/adapters", "//v1/completions", "/v1/completions/../x", "/sleep", "/"):
        assert route_of("POST", path) is route_of("DELETE", path) is Route.ALL
    assert route_of("GET", "/hotspan/cache") is Route.ALL
    assert route_of("POST", "/hotspan/cache/warm") is route_of("GET", "/hotspan/cache/warm/1") is Route.WARM
    assert route_of("POST", "/router/replicas/drain") is Route.ADMIN


class Slow(BaseHTTPRequestHandler):
    """A replica that takes its time until it is let go."""

    protocol_version = "HTTP/1.1"
    asked, goes = threading.Event(), threading.Event()

    def do_GET(self) -> None:
        self._say(b'{"status":"Healthy"}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.asked.set()
        self.goes.wait(120)
        self._say(b"done")

    def _say(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *words: Any) -> None:
        pass


def test_sigterm_lets_requests_end() -> None:
    """The process says where it listens; told to stop it refuses new work, ends what runs, and exits with 0.

    Before that, `hotspan route drain` and `resume` take a replica out and back.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [sys.executable, "-m", "hotspan", "route", "--replica", f"127.0.0.1:{server.server_port}", "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)$", process.stdout.readline().strip())
        assert found is not None
        port, statuses = int(found[1]), []

        def status(method: str, path: str, body: bytes | None = None) -> int:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request(method, path, body)
            return connection.getresponse().status

        def ask() -> None:
            statuses.append(status("POST", "/v1/completions", b'{"prompt": "x"}'))

        def administered(*words: str) -> str:
            done = CliRunner().invoke(app, ["route", *words, "--server", f"http://127.0.0.1:{port}"])
            assert done.exit_code == 0, done.output
            return done.output

        replica = f"http://127.0.0.1:{server.server_port}"
        assert "drained" in administered("drain", replica)
        assert '"is_drained": true' in administered("replicas", "--json")
        assert "takes requests" in administered("resume", replica)
        assert "closed" in administered("replicas")
        asking = threading.Thread(target=ask)
        asking.start()
        assert Slow.asked.wait(60)
        process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while status("GET", "/ping") == 200:
            assert time.monotonic() < deadline
        ask()
        Slow.goes.set()
        asking.join(60)
        assert statuses == [503, 200]
        assert process.wait(60) == 0
    finally:
        process.kill()
        server.shutdown()


def test_the_key_of_events_is_for_events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With events the key's file is read, and a key beside replicas without events is refused."""
    key = tmp_path / "key"
    key.touch(0o600)
    key.write_text("k" * 64)
    got, said = settings_of(monkeypatch, "--replica", f"{URL},events=tcp://10.0.0.1:1", "--kv-events-key", str(key))
    assert got is not None and got.events_keys is not None, said
    got, said = settings_of(monkeypatch, "--replica", URL, "--kv-events-key", str(key))
    assert got is None and "--kv-events-key" in said
