"""What can't work is refused at once, in one sentence that says what to do, with exit status 2."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.cli.serve import OPTIONS
from hotspan.config.settings import CacheOptions, TenantShare
from hotspan.config.tenants import Tenant, Tenants
from hotspan.core.directives import RetentionRule
from hotspan.core.errors import ConfigError
from hotspan.engine.arguments import add_cache, parse_engine_arguments
from hotspan.server.options import bind, check_exposure
from hotspan.tiers.directory import open_directory
from kit.ports import free_port

from .conftest import serve_options


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """The launcher may set variables before it refuses."""
    with mock.patch.dict(os.environ):
        yield


def refused(*arguments: str) -> tuple[int, str]:
    """Exit status and last line of a `hotspan serve` in this process: the command has no other way out of it."""
    port = () if "--port" in arguments else ("--port", str(free_port()))
    done = CliRunner().invoke(app, ["serve", *arguments, *port])
    return done.exit_code, (done.stderr.strip().splitlines() or [""])[-1]


def test_missing_model(tmp_path: Path) -> None:
    """A model that is not there: the message says what MODEL may be."""
    status, said = refused(str(tmp_path / "nothing"))
    assert status == 2
    assert "no model directory" in said and "hub id" in said


def test_directory_without_config(tmp_path: Path) -> None:
    """A directory that holds no model."""
    status, said = refused(str(tmp_path))
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
    settings = CacheOptions(ram_gib=0.1).settings()
    with pytest.raises(ConfigError) as refused:
        add_cache(parse_engine_arguments(str(tiny_model), options, OPTIONS), settings)
    assert expected in str(refused.value)


def test_typo_on_the_command_line(tiny_model: Path) -> None:
    """The same, as a user sees it: one line and exit status 2."""
    status, said = refused(str(tiny_model), "--ram-gib", "0.1", "--max-modle-len", "10")
    assert status == 2
    assert said.startswith("hotspan: unknown option --max-modle-len: did you mean --max-model-len")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--ram-gib", "0"), "--ram-gib is 0"),
        (("--disk", "/tmp/x"), "--disk is given without --disk-gib"),
        (("--disk-gib", "1"), "--disk-gib is given without --disk"),
        (("--ram-gib", "100000"), "lower --ram-gib"),
        (("--chunk-tokens", "0"), "--chunk-tokens is '0': give a whole number above 0"),
        (("--model-digest", "none"), "full (the default) or sampled"),
        (("--port", "99999"), "no port"),
        (("--host", "203.0.113.7"), "no address of this machine"),
        (("--host", "0.0.0.0"), "--tenants FILE"),
        (("--host", "::"), "--insecure"),
        (("--tenants", "/nonexistent"), "can't be read"),
        (("--admin-token-file", "/nonexistent"), "can't be read"),
        (("--persistence", "none", "--disk", "/tmp/x", "--disk-gib", "1"), "in memory only"),
        (("--persistence", "ram"), "tiers (the default) or none"),
        (("--l2", "lm://cache:65432"), "hotspan daemon --size-gib"),
        (("--l2", "redis://:s3cret@cache"), "password=file:/PATH"),
        (("--l2-option", "timeout_s=1"), "name it with --l2"),
        (("--persistence", "none", "--l2", "redis://cache"), "--l2 sends it away"),
        (("--kek", "env:X"), "--kek is given without --key-store"),
        (("--kek", "env:NOT_THERE", "--key-store", "/nonexistent"), "NOT_THERE"),
        (("--ram-gib", "0.1", "--api-key", "sk-x"), "--api-key is vLLM's"),
    ],
)
def test_own_options(tiny_model: Path, options: tuple[str, ...], expected: str) -> None:
    """A value of ours that can't work, or half of a pair."""
    status, said = refused(str(tiny_model), *options)
    assert status == 2
    assert expected in said


def test_keys_of_another_store(tiny_model: Path, tmp_path: Path) -> None:
    """A key store that another key-encryption key wraps is refused before the model loads."""
    from hotspan.keyring.records import StoreHeader
    from hotspan.keyring.store import create_store
    from hotspan.keyring.wrap import create_kek, open_wrapper

    for name in ("a", "b"):
        create_kek(tmp_path / name)
    create_store(tmp_path / "keys", StoreHeader(open_wrapper(f"file:{tmp_path / 'a'}", {}).id, 0.0))
    kek = ("--kek", f"file:{tmp_path / 'b'}", "--key-store", str(tmp_path / "keys"))
    status, said = refused(str(tiny_model), "--ram-gib", "0.1", *kek)
    assert status == 2 and "was made with" in said


def test_keys_open_the_door_to_other_machines(tmp_path: Path) -> None:
    """With keys, or with --insecure, any address will do; a file of rules without keys is no permission."""
    with contextlib.closing(bind("0.0.0.0", 0)) as listener:
        keyed = Tenants((Tenant("acme", (b"digest",), TenantShare("acme")),))
        check_exposure(listener, serve_options(tenants=keyed))
        check_exposure(listener, serve_options(insecure=True))
        ruled = Tenants(retention=(RetentionRule(ttl_s=60),))
        with pytest.raises(ConfigError, match="--tenants"):
            check_exposure(listener, serve_options(tenants=ruled))
    for host in ("127.0.0.1", "localhost", "127.8.9.10", "::1"):
        with contextlib.closing(bind(host, 0)) as listener:
            check_exposure(listener, serve_options(host=host))


def test_engine_key_of_the_environment(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    """VLLM_API_KEY would put vLLM's guard beside ours: refused like --api-key."""
    monkeypatch.setenv("VLLM_API_KEY", "sk-x")
    status, said = refused(str(tiny_model), "--ram-gib", "0.1")
    assert status == 2 and "VLLM_API_KEY is vLLM's" in said and "sk-x" not in said


def test_every_own_option_is_known_to_suggestions() -> None:
    """What `hotspan serve` takes is what its suggestions draw from."""
    command = get_command(app).commands["serve"]  # type: ignore[attr-defined]
    taken = {name for parameter in command.params for name in parameter.opts if name.startswith("--")}
    assert taken == set(OPTIONS)


def test_taken_port(tiny_model: Path) -> None:
    """A port that another process listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        status, said = refused(str(tiny_model), "--port", str(other.getsockname()[1]), "--ram-gib", "0.1")
    assert status == 2
    assert "is taken by another process" in said and "--port" in said


def refused_disk(model: Path, directory: Path, gib: str = "0.05") -> str:
    status, said = refused(str(model), "--ram-gib", "0.1", "--disk", str(directory), "--disk-gib", gib)
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
