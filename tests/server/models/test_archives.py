"""Archives in a store: unpacked once, privately, and never beyond their directory or their bounds."""

import io
import os
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hotspan.core.errors import ConfigError
from hotspan.server.models import archives
from hotspan.server.models.archives import unpacked

MODEL = {"config.json": b"{}", "weights/part-1.safetensors": b"w" * 100_000}


def make_tar(path: Path, files: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as pack:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            pack.addfile(info, io.BytesIO(content))
    return path


def make_zip(path: Path, files: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as pack:
        for name, content in files.items():
            pack.writestr(name, content)
    return path


Make = Callable[[Path, dict[str, bytes]], Path]
KINDS = pytest.mark.parametrize(("make", "suffix"), [(make_tar, ".tar.gz"), (make_zip, ".zip")])


def left_behind(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.rglob("*") if path.is_file())


@KINDS
def test_unpacked_once_and_privately(make: Make, suffix: str, tmp_path: Path) -> None:
    """Every file arrives, only this user can look, and a second start finds it; a new archive replaces the old one."""
    archive, cache = make(tmp_path / f"m{suffix}", MODEL), tmp_path / "cache"
    directory = unpacked(archive, "m", cache)
    assert {name: (directory / name).read_bytes() for name in MODEL} == MODEL
    assert directory.parent.stat().st_mode & 0o077 == 0
    written = (directory / "config.json").stat().st_ino
    assert unpacked(archive, "m", cache) == directory and (directory / "config.json").stat().st_ino == written
    make(archive, MODEL | {"config.json": b'{"new": 1}'})
    os.utime(archive, (1, 1))
    newer = unpacked(archive, "m", cache)
    assert newer != directory and not directory.exists()
    assert (newer / "config.json").read_bytes() == b'{"new": 1}'


@KINDS
def test_model_in_the_directory_that_was_packed(make: Make, suffix: str, tmp_path: Path) -> None:
    """An archive of a directory is the model in it; one without any model is an error."""
    inside = {f"llama/{name}": content for name, content in MODEL.items()}
    directory = unpacked(make(tmp_path / f"m{suffix}", inside), "m", tmp_path / "cache")
    assert (directory / "config.json").is_file() and directory.name == "llama"
    with pytest.raises(ConfigError, match="holds no model"):
        unpacked(make(tmp_path / f"n{suffix}", {"a/b/config.json": b"{}"}), "n", tmp_path / "cache")


@KINDS
@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/tmp/hotspan-evil", "..\\evil"])
def test_nothing_leaves_its_directory(make: Make, suffix: str, name: str, tmp_path: Path) -> None:
    """A path that leads out is an error that names it, and nothing of the archive stays."""
    archive = make(tmp_path / f"m{suffix}", MODEL | {name: b"evil"})
    with pytest.raises(ConfigError, match="leads out of the model's directory"):
        unpacked(archive, "m", tmp_path / "cache")
    assert left_behind(tmp_path) == [archive.name] and not Path("/tmp/hotspan-evil").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE])
def test_links_and_devices_are_refused(kind: bytes, tmp_path: Path) -> None:
    """What is no file is an error: a link could lead the next file out."""
    archive = tmp_path / "m.tar"
    with tarfile.open(archive, "w") as pack:
        info = tarfile.TarInfo("weights")
        info.type, info.linkname = kind, "/etc"
        pack.addfile(info)
    with pytest.raises(ConfigError, match="pack it without links"):
        unpacked(archive, "m", tmp_path / "cache")


@KINDS
def test_bombs_and_floods_are_stopped(make: Make, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An archive that grows beyond its bound, or has too many files, is given up, and what was written is gone."""
    monkeypatch.setattr(archives, "GIB", 1 << 20)
    bomb = make(tmp_path / f"bomb{suffix}", MODEL | {"zeros": bytes(32 << 20)})
    with pytest.raises(ConfigError, match="its size lets expect"):
        unpacked(bomb, "bomb", tmp_path / "cache")
    monkeypatch.setattr(archives, "MAX_FILES", 10)
    flood = make(tmp_path / f"flood{suffix}", {"config.json": b"{}", **{f"f{n}": b"" for n in range(10)}})
    with pytest.raises(ConfigError, match="more than 10 files"):
        unpacked(flood, "flood", tmp_path / "cache")
    assert left_behind(tmp_path / "cache") == []


@KINDS
def test_damage_is_an_error(make: Make, suffix: str, tmp_path: Path) -> None:
    """An archive that is cut off, or is none, is a ConfigError that names it, and nothing stays."""
    files = {**MODEL, "noise": os.urandom(200_000)}
    whole = make(tmp_path / f"m{suffix}", files).read_bytes()
    for content in (whole[: len(whole) // 2], b"nothing", b""):
        (tmp_path / f"m{suffix}").write_bytes(content)
        with pytest.raises(ConfigError, match=rf"m{suffix} is damaged"):
            unpacked(tmp_path / f"m{suffix}", "m", tmp_path / "cache")
    assert left_behind(tmp_path / "cache") == []


def test_a_place_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """Nobody else may change a model after it was unpacked."""
    archive, cache = make_zip(tmp_path / "m.zip", MODEL), tmp_path / "cache"
    unpacked(archive, "m", cache).parent.chmod(0o777)
    with pytest.raises(ConfigError, match="open to other users"):
        unpacked(archive, "m", cache)
