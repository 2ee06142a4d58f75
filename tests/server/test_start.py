"""What stands before the engine: sockets, certificate, model, secure mode, in the order in which they may be wrong."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.config.admin_token import find_token
from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.server import options as options_module
from hotspan.server import run
from hotspan.server.hardening import NO_MEDIA_DOMAIN
from hotspan.server.options import ServeOptions
from kit.ports import free_port
from tests.certificates import make_certificate
from tests.server.conftest import serve_options


@pytest.fixture
def ports() -> tuple[int, int]:
    """Two that nobody listens on."""
    one = other = free_port()
    while other == one:
        other = free_port()
    return one, other


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """What the engine would be started with, each time; the admin token that commands of this user find."""
    found: list[dict[str, Any]] = []

    async def serve(options: ServeOptions, entrance: run.Entrance, *given: Any, **named: Any) -> None:
        at = [listener.getsockname()[1] for listener in entrance.listeners]
        found.append({"options": options, "ports": at, "token": find_token(at[-1], os.environ)})

    monkeypatch.setattr(run, "_serve", serve)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HOTSPAN_ADMIN_TOKEN", raising=False)
    before = dict(os.environ)
    yield found
    os.environ.clear()
    os.environ.update(before)


def options(port: int, **given: Any) -> ServeOptions:
    return serve_options(**{"model": "org/name", "cache": None, "port": port} | given)


def test_two_ports(started: list[dict[str, Any]], ports: tuple[int, int]) -> None:
    """With --admin-port there are two sockets, and commands of this user find the token by the administrator's."""
    port, admin_port = ports
    run.run_server(options(port, admin_port=admin_port))
    run.run_server(options(port))
    first, second = started
    assert first["ports"] == [port, admin_port] and second["ports"] == [port]
    assert first["token"] and second["token"] and first["token"] != second["token"]
    assert first["options"].engine == ("--allowed-media-domains", NO_MEDIA_DOMAIN)
    assert os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"
    assert find_token(port, os.environ) is None


def test_redirects_that_somebody_wants(started: list[dict[str, Any]], ports: tuple[int, int]) -> None:
    """What the operator says of redirects stays."""
    os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] = "1"
    run.run_server(options(ports[0]))
    assert os.environ["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "1"


def test_what_is_wrong_is_said_first(
    started: list[dict[str, Any]], ports: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong certificate, an option or a file that secure mode forbids: refused before the engine is started."""
    from hotspan.config.server_settings import ServerSettings

    secure = ServerSettings(secure=True)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.py").write_text("")
    for given in (
        {"engine": ("--ssl-certfile", "/nowhere")},
        {"server": secure, "engine": ("--trust-remote-code",)},
        {"server": secure, "model": str(tmp_path / "model")},
        {"admin_port": ports[0]},
    ):
        with pytest.raises(ConfigError):
            run.run_server(options(ports[0], **given))
    assert started == []


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
def test_a_model_that_is_fetched(
    started: list[dict[str, Any]],
    ports: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    is_tls: bool,
) -> None:
    """While a model is fetched the port says that it is loading, over TLS where there is a certificate."""
    pair = make_certificate(tmp_path)
    said: list[Any] = []

    def fetch(url: str, cache: Path, *, is_secure: bool) -> Path:
        import ssl

        context = ssl.create_default_context(cafile=str(pair.certificate))
        connection = (
            http.client.HTTPSConnection("127.0.0.1", ports[0], timeout=60, context=context)
            if is_tls
            else http.client.HTTPConnection("127.0.0.1", ports[0], timeout=60)
        )
        with contextlib.closing(connection):
            connection.request("GET", "/ping")
            said.append(json.loads(connection.getresponse().read()))
        assert url == "s3://bucket/model" and cache == tmp_path / "hotspan" / "models"
        return tmp_path

    monkeypatch.setattr(options_module, "fetch_model", fetch)
    engine = ("--ssl-certfile", str(pair.certificate), "--ssl-keyfile", str(pair.key)) if is_tls else ()
    run.run_server(options(ports[0], model="s3://bucket/model", engine=engine, tenants=Tenants()))
    assert said == [{"status": "Loading"}] and started[0]["options"].model == str(tmp_path)


_LOADS_FOR_EVER = """
import subprocess, sys
from hotspan.config.server_settings import ServerSettings
from hotspan.core.errors import EngineError
from hotspan.server import run
from hotspan.server.loading import loading_within
from hotspan.server.options import ServeOptions

async def serve(options, entrance, own, error_file, aftermath):
    with loading_within(options.server.startup_timeout_s, error_file):
        engine = subprocess.Popen(["sleep", "600"])
        print(engine.wait(), flush=True)  # blocks the event loop, as loading does
    raise EngineError("the engine core did not start")

run._serve = serve
run.run_server(ServeOptions("m", None, server=ServerSettings(port=int(sys.argv[1]), startup_timeout_s=0.1)))
"""


def test_a_model_that_loads_for_too_long(ports: tuple[int, int], tmp_path: Path) -> None:
    """After --startup-timeout-s the engine's processes are ended, and one sentence says what to do."""
    variables = {"XDG_RUNTIME_DIR": str(tmp_path), "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _LOADS_FOR_EVER, str(ports[0])],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout.strip() == str(-signal.SIGTERM), done.stderr
    last = done.stderr.splitlines()[-1]
    assert "ConfigError: the model was not loaded within 0.1 s" in last and "SAGEMAKER_STARTUP_TIMEOUT" in last
    assert list(tmp_path.glob("hotspan-*")) == []


def test_from_the_command_line(
    monkeypatch: pytest.MonkeyPatch, ports: tuple[int, int], started: list[dict[str, Any]]
) -> None:
    """--admin-port and s3:// reach the server; --admin-host alone is an error that says what is missing."""
    port, admin_port = map(str, ports)
    done = CliRunner().invoke(app, ["serve", "org/name", "--no-cache", "--port", port, "--admin-port", admin_port])
    assert done.exit_code == 0, done.output
    assert started[0]["ports"] == [*ports]
    done = CliRunner().invoke(app, ["serve", "org/name", "--admin-host", "0.0.0.0"])
    assert done.exit_code == 2 and "--admin-host is given without --admin-port" in done.output
    monkeypatch.setenv("HF_MODEL_ID", "s3://bucket/model")
    done = CliRunner().invoke(app, ["config", "check", "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    assert "s3://bucket/model" in done.output
