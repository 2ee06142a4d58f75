"""What can't work is refused at once, in one sentence that says what to do, with exit status 2."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspan.cli.serve import OWN_OPTIONS
from hotspan.config.settings import cache_settings
from hotspan.core.errors import ConfigError
from hotspan.engine.arguments import add_cache, parse_engine_arguments
from hotspan.tiers.directory import open_directory

from .conftest import refusal


def test_missing_model(tmp_path: Path) -> None:
    """A model that is not there: the message says what MODEL may be."""
    status, said = refusal(str(tmp_path / "nothing"))
    assert status == 2
    assert "no model directory" in said and "hub id" in said


def test_directory_without_config(tmp_path: Path) -> None:
    """A directory that holds no model."""
    status, said = refusal(str(tmp_path))
    assert status == 2 and "config.json" in said


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--dtpye", "float32"), "did you mean --dtype"),
        (("--ram-gibs", "1"), "did you mean --ram-gib"),
        (("--dtype", "float31"), "invalid choice: 'float31'"),
        (("--kv-transfer-config", '{"kv_connector":"X","kv_role":"kv_both"}'), "leave it out"),
        (("stray",), "'stray' belongs to no option"),
        (("--api-server-count", "2"), "--api-server-count can't be used"),
    ],
)
def test_engine_options(tiny_model: Path, options: tuple[str, ...], expected: str) -> None:
    """An option that vLLM does not know, a value that it does not take, an option that is hotspan's to set."""
    settings = cache_settings(ram_gib=0.1)
    with pytest.raises(ConfigError) as refused:
        add_cache(parse_engine_arguments(str(tiny_model), options, OWN_OPTIONS), settings)
    assert expected in str(refused.value)


def test_typo_on_the_command_line(tiny_model: Path) -> None:
    """The same, as a user sees it: one line and exit status 2."""
    status, said = refusal(str(tiny_model), "--ram-gib", "0.1", "--max-modle-len", "10")
    assert status == 2
    assert said.startswith("hotspan: unknown option --max-modle-len: did you mean --max-model-len")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--ram-gib", "0"), "--ram-gib is 0"),
        (("--disk", "/tmp/x"), "--disk is given without --disk-gib"),
        (("--disk-gib", "1"), "--disk-gib is given without --disk"),
        (("--ram-gib", "100000"), "lower --ram-gib"),
        (("--chunk-tokens", "0"), "--chunk-tokens is 0"),
        (("--model-digest", "none"), "sampled or full"),
        (("--port", "99999"), "no port"),
        (("--host", "203.0.113.7"), "no address of this machine"),
    ],
)
def test_own_options(tiny_model: Path, options: tuple[str, ...], expected: str) -> None:
    """A value of ours that can't work, or half of a pair."""
    status, said = refusal(str(tiny_model), *options)
    assert status == 2
    assert expected in said


def test_taken_port(tiny_model: Path) -> None:
    """A port that another process listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        status, said = refusal(str(tiny_model), "--port", str(other.getsockname()[1]), "--ram-gib", "0.1")
    assert status == 2
    assert "is taken by another process" in said and "--port" in said


def refused_disk(model: Path, directory: Path, gib: str = "0.05") -> str:
    status, said = refusal(str(model), "--ram-gib", "0.1", "--disk", str(directory), "--disk-gib", gib)
    assert status == 2
    return said


def test_disk_in_use(tiny_model: Path, tmp_path: Path) -> None:
    """A disk directory that another process owns: the message names it."""
    owner = open_directory(tmp_path / "kv", 1 << 20, 1 << 22)
    try:
        said = refused_disk(tiny_model, tmp_path / "kv")
    finally:
        owner.close()
    assert f"in use by process {os.getpid()}" in said


def test_disk_too_large(tiny_model: Path, tmp_path: Path) -> None:
    """A disk tier larger than what is free."""
    said = refused_disk(tiny_model, tmp_path / "kv", "1000000")
    assert "GiB free" in said and "lower --disk-gib" in said


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A small file system of our own, as root; elsewhere these checks run in the tiers' tests."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root")
    point = tmp_path / "mount"
    point.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", point]).returncode:
        pytest.skip("this sandbox mounts nothing")
    try:
        yield point
    finally:
        subprocess.run(["umount", point], check=True)


def test_disk_full(tiny_model: Path, mounted: Path) -> None:
    """A file system with less space than the tier asks for."""
    assert "GiB free" in refused_disk(tiny_model, mounted / "kv")


def test_disk_read_only(tiny_model: Path, mounted: Path) -> None:
    """A read-only file system."""
    subprocess.run(["mount", "-o", "remount,ro", mounted], check=True)
    assert "read-only" in refused_disk(tiny_model, mounted / "kv")
