"""From what an operator writes to what the server does, without an engine."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hotspan.config.settings import CacheOptions
from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.http.connections import HttpLimits
from hotspan.server import forgetting, run
from hotspan.server.adapters import opening
from hotspan.server.adapters.snapshots import SnapshotStore
from hotspan.server.adapters.source import Sources
from hotspan.server.admin import CacheAdmin
from hotspan.server.front import Front
from hotspan.server.options import ServeOptions
from hotspan.server.principal import Principal, asking
from tests.config.rig import configured

from .adapters.rig import FakeEngine as LoraEngine
from .adapters.rig import write_adapter
from .lmi.fake_engine import FakeEngine
from .lmi.serving import invoke

SESSION = "X-Amzn-SageMaker-Session-Id"


class Administered:
    """An engine that remembers what it was told to forget."""

    max_tokens, max_chars = 4096, 4096 * 10

    def __init__(self) -> None:
        self.told: list[tuple[Any, Any]] = []

    async def administer(self, command: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        assert command["do"] == "invalidate"
        self.told.append((command["session"], command["tenant"]))
        return [{"is_durable": True}]


def served(directory: Path, **given: Any) -> tuple[Front, Administered]:
    """The front of a server with this YAML, and its engine."""
    done = configured(own={"sessions-path": str(directory / "sessions"), **given})
    engine = Administered()
    admin = CacheAdmin(cast(Any, engine), CacheOptions(ram_gib=1).settings(), Tenants())
    forget = forgetting.forget_sessions(admin)
    return Front(FakeEngine().app(), done.server, HttpLimits(), is_alive=lambda: True, forget=forget), engine


@pytest.mark.parametrize(("given", "status"), [({"strict-sessions": True}, 400), ({}, 200)])
async def test_strict_sessions(tmp_path: Path, given: dict[str, Any], status: int) -> None:
    """With --strict-sessions an id that nobody made is an error, in requests and at its close; a known one is not."""
    app, _ = served(tmp_path, **given)
    for body in ({"inputs": "Say"}, {"requestType": "CLOSE"}):
        answer = await invoke(app, body, **{SESSION: "never-was"})
        assert answer.status_code == status
        if status == 400:
            assert "never-was" in answer.json()["error"]["message"]
    made = (await invoke(app, {"requestType": "NEW_SESSION"})).json()["session_id"]
    assert (await invoke(app, {"inputs": "Say"}, **{SESSION: made})).status_code == 200


@pytest.mark.parametrize("given", [{"forget-closed-sessions": True}, {}])
async def test_forgetting_closed_sessions(tmp_path: Path, given: dict[str, Any]) -> None:
    """With --forget-closed-sessions the engine is told to invalidate a session of its tenant once it is closed."""
    app, engine = served(tmp_path, **given)
    with asking(Principal("acme", has_key=True)):
        await invoke(app, {"inputs": "Say"}, **{SESSION: "s1"})
        assert engine.told == []
        assert (await invoke(app, {"requestType": "CLOSE"}, **{SESSION: "s1"})).status_code == 200
    assert engine.told == ([("s1", "acme")] if given else [])


def test_nothing_to_forget_in() -> None:
    """Without hotspan's tiers nothing could be forgotten: that is said, and not ignored."""
    with pytest.raises(ConfigError, match=r"forget-closed-sessions.*no-cache"):
        configured(own={"forget-closed-sessions": True, "no-cache": True})


def test_where_copies_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--adapter-copies names the directory, always by the same absolute path; else it is the user's in /tmp."""
    monkeypatch.chdir(tmp_path)
    assert opening.copies_directory(configured(flags={"adapter_copies": "copies"}).server) == tmp_path / "copies"
    assert opening.copies_directory(configured(variables={"HOTSPAN_ADAPTER_COPIES": "/nvme/copies"}).server) == Path(
        "/nvme/copies"
    )
    assert opening.copies_directory(configured().server) == Path(f"/tmp/hotspan-adapters-{os.geteuid()}")


@pytest.mark.parametrize("is_named", [False, True])
def test_what_nobody_asked_for_is_gone_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_named: bool
) -> None:
    """The directory of copies goes with its last copy, unless --adapter-copies named it."""
    root, told = tmp_path / "copies", list[tuple[Path, bool]]()
    monkeypatch.setattr(opening, "copies_directory", lambda server: root)
    aftermath = SimpleNamespace(sweep=lambda root, is_whole: told.append((root, is_whole)))
    settings = configured(flags={"adapter_copies": str(root)} if is_named else {}).server
    with opening.copies_swept(settings, cast(Any, aftermath)):
        write_adapter(tmp_path / "adapters" / "a")
        store = SnapshotStore(root)
        snapshot = store.take(Sources([tmp_path / "adapters"]), tmp_path / "adapters" / "a", lambda copy: None)
        assert told == [(root, not is_named)]
        snapshot.close()
        assert list(root.iterdir()) == []
    assert root.exists() is is_named


class Lora(LoraEngine):
    """An engine with LoRA as the server knows it."""

    max_rank = 8

    def publish(self, names: Callable[[], Iterable[str]]) -> None:
        self.published = names

    def adapters(self) -> "Lora":
        return self


async def test_adapters_bring_their_formatters(tmp_path: Path) -> None:
    """`hotspan serve DIR --enable-lora`, and no word more: the formatter of an adapter in DIR/adapters is used."""
    directory = write_adapter(tmp_path / "model" / "adapters" / "legal")
    (directory / "formatter.yaml").write_text("input: {prefix: Whereas}")
    done = configured(
        "--enable-lora", model=str(tmp_path / "model"), flags={"adapter_copies": str(tmp_path / "copies")}
    )
    assert done.server.adapters is None and done.server.formatters is None
    formatters = run._formatters(done.server, has_lora=True)
    assert formatters is not None
    options = ServeOptions(done.model, None, server=done.server)
    registry = await opening.open_adapters(cast(Any, Lora()), options, formatters)
    assert registry is not None
    try:
        assert [one.name for one in registry.seen_by("")] == ["legal"] and len(
            list((tmp_path / "copies").iterdir())
        ) == 1
        assert formatters.has_input("legal") and not formatters.has_input(None)
    finally:
        await registry.close()
    assert run._formatters(done.server, has_lora=False) is None
