"""`hotspan keys`: what an administrator does with the store at rest."""

import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from hotspan.cli import admin_client
from hotspan.cli.main import app
from hotspan.keyring.keyring import open_keyring
from tests.keyring.conftest import Kms
from tests.keyring.rig import make_kek, opened, reads, sealed


def keys(*arguments: object, status: int = 0) -> Result:
    """Run `hotspan keys`, which must end with `status` and without a traceback."""
    result = CliRunner().invoke(app, ["keys", *map(str, arguments)])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def test_init_makes_a_store_and_its_key(tmp_path: Path) -> None:
    """`init --new-kek` leaves a private store and KEK that a keyring can use; again is an error."""
    store, kek = tmp_path / "keys", f"file:{tmp_path / 'kek'}"
    keys("init", "--store", store, "--kek", kek, status=2)
    result = keys("init", "--store", store, "--kek", kek, "--new-kek")
    assert "keep a copy" in result.output
    assert stat.S_IMODE(store.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "kek").stat().st_mode) == 0o600
    opened(store, kek, "a").close()
    assert "exists already" in keys("init", "--store", store, "--kek", kek, "--new-kek", status=2).output
    assert "already" in keys("init", "--store", store, "--kek", kek, status=2).output


def test_init_takes_the_kek_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """env:NAME is read from the process's environment, and --new-kek makes files only."""
    monkeypatch.setenv("A_KEK", os.urandom(32).hex())
    assert "file:PATH" in keys("init", "--store", tmp_path / "s", "--kek", "env:A_KEK", "--new-kek", status=2).output
    keys("init", "--store", tmp_path / "s", "--kek", "env:A_KEK")
    keys("list", "--store", tmp_path / "s")


def test_init_tries_the_kms(kms: Kms, tmp_path: Path) -> None:
    """A KMS key that can't be used is found out before a store is made."""
    store = tmp_path / "keys"
    keys("init", "--store", store, "--kek", kms.reference("nope"), status=2)
    assert not store.exists()
    keys("init", "--store", store, "--kek", kms.reference())
    assert store.exists()


def test_list_shows_tenants_and_no_secret(store: Path, kek: str) -> None:
    """Tenants, the number of their roots and their ages; nothing wrapped or in the clear."""
    with opened(store, kek, "acme", "zeta") as keyring:
        keyring.rotate("acme")
        secrets = [root.secret.hex() for held in keyring._held.values() for root in held.secrets.roots]
    output = keys("list", "--store", store).output
    rows = [line.split() for line in output.splitlines()[1:]]
    assert rows[0] == ["TENANT", "ROOTS", "OLDEST", "NEWEST"]
    assert [(row[0], row[1]) for row in rows[1:]] == [("'acme'", "2"), ("'zeta'", "1")]
    assert rows[1][2:4] == ["0.0", "d"]
    assert not any(secret in output for secret in secrets)


def test_rotate_gives_a_tenant_a_new_root(store: Path, kek: str) -> None:
    """The root that is printed seals the next frame; older frames open."""
    with opened(store, kek, "acme") as keyring:
        frame = sealed(keyring, "acme")
    output = keys("rotate", "--store", store, "--kek", kek, "--tenant", "acme").output
    with opened(store, kek, "acme") as keyring:
        assert sealed(keyring, "acme")[0].hex() in output
        assert reads(keyring, frame)
    assert "keys list" in keys("rotate", "--store", store, "--kek", kek, "--tenant", "other", status=2).output
    assert "nothing to rotate" in keys("rotate", "--store", store, "--kek", kek, status=2).output


def test_rotate_replaces_the_kek(store: Path, kek: str, tmp_path: Path) -> None:
    """After --new-kek only the new one opens the store."""
    with opened(store, kek, "acme") as keyring:
        names = keyring.names("acme")
    new = make_kek(tmp_path, "new")
    assert "1 tenants" in keys("rotate", "--store", store, "--kek", kek, "--new-kek", new).output
    keys("rotate", "--store", store, "--kek", kek, "--tenant", "acme", status=2)
    with opened(store, new, "acme") as keyring:
        assert keyring.names("acme") == names


def test_shred_wants_a_yes_and_prints_a_receipt(store: Path, kek: str) -> None:
    """Without a terminal --yes is needed; then the roots that are gone are named, and are gone."""
    with opened(store, kek, "acme") as keyring:
        frame = sealed(keyring, "acme")
    arguments = ("shred", "--store", store, "--kek", kek, "--tenant", "acme")
    assert "confirm with --yes" in keys(*arguments, status=2).output
    output = keys(*arguments, "--yes").output
    assert "shredded tenant 'acme' at 20" in output and frame[0].hex() in output
    with opened(store, kek, "acme") as keyring:
        assert not reads(keyring, frame)
        keyring.shred("acme")
    assert "no keys" in keys(*arguments, "--yes", status=2).output


def keys_of(roots: Sequence[str], had_keys: bool = True) -> dict[str, Any]:
    return {"replicas": [], "shredded": {"tenant": "t", "roots": [*roots], "at": 1.0, "had_keys": had_keys}}


def behind_a_router(*bodies: dict[str, Any]) -> dict[str, Any]:
    rows = [{"replica": f"http://{n}", "status": 200, "body": body} for n, body in enumerate(bodies)]
    return {"is_complete": True, "replicas": rows}


@pytest.mark.parametrize(
    ("answer", "status", "said"),
    [
        (keys_of(["aa"]), 0, "root aa"),
        (keys_of([]), 0, "shredded tenant 't'"),
        (keys_of([], False), 2, "has no keys at http://x"),
        (behind_a_router(keys_of([], False), keys_of(["aa"])), 0, "root aa"),
        (behind_a_router(keys_of([], False), keys_of([], False)), 2, "has no keys at http://x"),
    ],
)
def test_a_server_s_shred_says_what_was_destroyed(
    answer: Any, status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica or several behind a router; a tenant that none of them knows was not shredded."""
    monkeypatch.setattr(admin_client.Admin, "post", lambda *_: answer)
    assert said in keys("shred", "--server", "http://x", "--tenant", "t", "--yes", status=status).output


@pytest.mark.parametrize("answer", [{"ok": 1}, [1], 1, None, {"roots": 1, "shredded": 1}, {"shredded": {}}])
@pytest.mark.parametrize("words", [("rotate",), ("shred", "--yes")])
@pytest.mark.parametrize("route", [lambda one: one, lambda one: behind_a_router(one)])
def test_the_answer_of_another_server_is_said(
    words: Sequence[str], answer: Any, route: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its JSON is: one line, and no traceback."""
    monkeypatch.setattr(admin_client.Admin, "post", lambda *_: route(answer))
    output = keys(*words, "--server", "http://x", "--tenant", "t", status=2).output
    assert "http://x does not answer as hotspan does" in output


@pytest.mark.parametrize("route", [lambda one: one, behind_a_router])
def test_a_server_s_rotation_names_the_roots(
    route: Callable[[dict[str, Any]], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica's, or those of several behind a router."""
    monkeypatch.setattr(admin_client.Admin, "post", lambda *_: route({"tenant": "t", "roots": ["aa", "bb"]}))
    output = keys("rotate", "--server", "http://x", "--tenant", "t").output
    assert "writes under the new root aa, bb now" in output


def test_a_store_in_use_is_not_changed(store: Path, kek: str) -> None:
    """While a server uses the store, rotate and shred name its process; list works."""
    with opened(store, kek, "acme"):
        for command in ("rotate", "shred"):
            output = keys(command, "--store", store, "--kek", kek, "--tenant", "acme", status=2).output
            assert str(os.getpid()) in output and "--server" in output
        assert "acme" in keys("list", "--store", store).output


def test_what_the_disk_refuses_is_one_line(store: Path, kek: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An I/O error ends with status 2 and says that it is not sure."""
    opened(store, kek, "acme").close()

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", fail)
    output = keys("shred", "--store", store, "--kek", kek, "--tenant", "acme", "--yes", status=2).output
    assert "Input/output error" in output
    monkeypatch.undo()
    with open_keyring(store, kek, {}) as keyring:
        assert keyring.has("acme")
