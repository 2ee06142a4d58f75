"""`hotspan adapters`, against the routes of a server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from typer.testing import CliRunner

from hotspan.cli import admin_client
from hotspan.cli.main import app
from hotspan.core.errors import ConfigError
from hotspan.server.adapters.routes import adapter_router
from tests.server.adapters.rig import Rig


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A server with the adapters' routes, where the commands' calls go."""
    rig = Rig(tmp_path)
    rig.write("a"), rig.write("b", 1)
    routes = FastAPI()
    routes.include_router(adapter_router(rig.registry, {"lmi"}, is_open=True))
    with TestClient(routes) as client:

        def call(self: Any, method: str, path: str, body: Any, timeout_s: float) -> Any:
            answer = client.request(method, path, json=body)
            if answer.status_code != 200:
                raise ConfigError(answer.json()["error"]["message"])
            return answer.json()

        monkeypatch.setattr(admin_client.Admin, "_call", call)
        yield


def run(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["adapters", *words])
    return done.exit_code, done.output


@pytest.mark.usefixtures("server")
def test_the_life_of_an_adapter() -> None:
    """Registered, listed, updated and removed."""
    assert run("register", "x/y", "a", "--lazy")[0] == 2  # no name of an adapter
    assert run("register", "x", "a", "--lazy") == (0, "Adapter x registered\n")
    (first,) = json.loads(run("list", "--json")[1])["adapters"]
    assert (first["name"], first["loaded"]) == ("x", False)
    assert run("update", "x", "b") == (0, "Adapter x updated\n")
    (second,) = json.loads(run("list", "--json")[1])["adapters"]
    assert second["digest"] != first["digest"]
    assert second["digest"][:12] in run("list")[1]
    assert run("remove", "x") == (0, "Adapter x unregistered\n")
    status, output = run("remove", "x")
    assert status == 2 and "x" in output
