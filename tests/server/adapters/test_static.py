"""Adapters named on the command line are loaded from private copies."""

from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hotspan.core.errors import ConfigError
from hotspan.server.adapters.snapshots import pinned_adapters
from hotspan.server.adapters.source import CONFIG, WEIGHTS


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "adapter"
    path.mkdir()
    (path / CONFIG).write_text("{}")
    (path / WEIGHTS).write_bytes(b"old")
    return path


def test_overwritten_files_change_nothing(adapter: Path, tmp_path: Path) -> None:
    """The engine reads what was there at the start, however often it loads it; the copy is gone afterwards."""
    module = SimpleNamespace(name="a", path=str(adapter))
    with pinned_adapters(Namespace(lora_modules=[module]), tmp_path / "copies"):
        (adapter / WEIGHTS).write_bytes(b"new")
        assert Path(module.path).is_relative_to(tmp_path / "copies")
        assert (Path(module.path) / WEIGHTS).read_bytes() == b"old"
    assert list((tmp_path / "copies").iterdir()) == []


def test_files_may_be_links(adapter: Path, tmp_path: Path) -> None:
    """A directory that is a link is copied, too, and files that are links, as the hub has them."""
    (adapter / WEIGHTS).rename(tmp_path / "blob")
    (adapter / WEIGHTS).symlink_to(tmp_path / "blob")
    link = tmp_path / "link"
    link.symlink_to(adapter)
    module = SimpleNamespace(name="a", path=str(link))
    with pinned_adapters(Namespace(lora_modules=[module]), tmp_path / "copies"):
        assert (Path(module.path) / WEIGHTS).read_bytes() == b"old"


def test_no_room_is_said_at_the_start(adapter: Path, tmp_path: Path) -> None:
    """A store that can't be used is an error in a sentence, before the model loads."""
    (tmp_path / "copies").mkdir(mode=0o755)
    module = SimpleNamespace(name="a", path=str(adapter))
    pinned = pinned_adapters(Namespace(lora_modules=[module]), tmp_path / "copies")
    with pytest.raises(ConfigError, match="--adapter-copies"), pinned:
        pass


@pytest.mark.parametrize("modules", [None, []])
def test_without_adapters_nothing_is_made(modules: object, tmp_path: Path) -> None:
    """No directory for copies where there is nothing to copy."""
    with pinned_adapters(Namespace(lora_modules=modules), tmp_path / "copies"):
        assert not (tmp_path / "copies").exists()


def test_what_is_no_directory_of_safetensors_stays(adapter: Path, tmp_path: Path) -> None:
    """Names of the hub and pickled adapters are the engine's to find."""
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    modules = [SimpleNamespace(name="a", path=str(adapter)), SimpleNamespace(name="b", path="some/adapter")]
    with pinned_adapters(Namespace(lora_modules=modules), tmp_path / "copies"):
        assert [module.path for module in modules] == [str(adapter), "some/adapter"]
