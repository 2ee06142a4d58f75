"""Models from S3, by a real client and moto's server: whole or not at all, gone on with, and nothing out of place."""

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from obstore.store import S3Store

from hotspan.config.server_settings import ServerSettings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.plan.weights import is_remote
from hotspan.server import run
from hotspan.server import source as model_source
from hotspan.server.entrance import Entrance
from hotspan.server.options import ServeOptions, fetched
from hotspan.server.principal import Credentials
from hotspan.server.source import RemoteFile, fetch_model, model_cache
from kit.s3_server import S3Server

WEIGHTS = bytes(range(256)) * 4096  # 1 MiB
MODEL = {
    "config.json": b"{}",
    "tokenizer.json": b"",
    "model-00001.safetensors": WEIGHTS,
    "model-00002.safetensors": WEIGHTS[::-1],
    "adapters/a/adapter_model.safetensors": b"adapter",
}

HEADERS = {
    "content-type": "binary/octet-stream",
    # Of which moto takes the name only; without any it refuses to replace objects.
    "authorization": "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=, Signature=0",
}
_numbers = itertools.count(1)


class Bucket:
    """A bucket with what was put into it."""

    def __init__(self, server: S3Server, name: str) -> None:
        self.server, self.name = server, name
        self.ask("PUT", "")

    def put(self, prefix: str, files: dict[str, bytes]) -> str:
        for path, data in files.items():
            self.ask("PUT", f"/{quote(f'{prefix}/{path}')}", data)
        return f"s3://{self.name}/{prefix}"

    def ask(self, method: str, path: str, data: bytes | None = None) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"{self.server.url}/{self.name}{path}", data, HEADERS, method=method)
        with opener.open(request, timeout=60) as answer:
            answer.read()


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture
def bucket(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret that nobody prints")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    return Bucket(server, f"bucket-{next(_numbers)}")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "_PART_BYTES", 100_001)
    monkeypatch.setattr(model_source, "_WRITE_BYTES", 10_000)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def asked_parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The parts that are fetched from here on."""
    found: list[tuple[str, int]] = []
    copy = model_source._copy

    def counted(store: object, part: model_source._Part, fd: int) -> None:
        found.append((part.file.path, part.start))
        copy(store, part, fd)  # type: ignore[arg-type]

    monkeypatch.setattr(model_source, "_copy", counted)
    return found


def test_whole_and_once(bucket: Bucket, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file arrives byte for byte, in parts, side by side; what is there is not fetched again."""
    url = bucket.put("models/llama", MODEL)
    parts = asked_parts(monkeypatch)
    directory = fetch_model(url, tmp_path / "cache")
    assert contents(directory) == MODEL and directory.name.startswith("llama-")
    assert len(parts) == len(set(parts)) and len(parts) > 20
    parts.clear()
    assert fetch_model(f"{url}/", tmp_path / "cache") == directory and parts == []
    assert directory.stat().st_mode & 0o077 == 0 and (tmp_path / "cache").stat().st_mode & 0o077 == 0


def test_a_changed_model_is_another(bucket: Bucket, tmp_path: Path) -> None:
    """What changes in the bucket gives another directory, so that nothing of two versions is ever mixed."""
    url = bucket.put("m", MODEL)
    old = fetch_model(url, tmp_path / "cache")
    bucket.put("m", {"model-00001.safetensors": WEIGHTS[::-1]})  # the same size
    new = fetch_model(url, tmp_path / "cache")
    assert new != old and contents(old) == MODEL
    assert contents(new) == MODEL | {"model-00001.safetensors": WEIGHTS[::-1]}


def test_what_was_taken_out_comes_back(bucket: Bucket, tmp_path: Path) -> None:
    """A directory that lost a file, or a part of one, is fetched anew and not served."""
    url = bucket.put("m", MODEL)
    directory = fetch_model(url, tmp_path / "cache")
    (directory / "tokenizer.json").unlink()
    (directory / "model-00001.safetensors").write_bytes(b"short")
    assert fetch_model(url, tmp_path / "cache") == directory and contents(directory) == MODEL


FETCH = """
import itertools, sys, threading
from pathlib import Path
from hotspan.server import source as model_source
model_source._PART_BYTES, model_source._CONNECTIONS = 100_001, 2
copy, numbers = model_source._copy, itertools.count(1)
def halting(*given):
    copy(*given)
    print("part", flush=True)
    if next(numbers) >= 8:
        threading.Event().wait()
model_source._copy = halting
model_source.fetch_model(sys.argv[1], Path(sys.argv[2]))
"""


def test_killed_in_between(bucket: Bucket, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kill nothing is published, and the next start fetches only what is missing."""
    url, cache = bucket.put("m", MODEL), tmp_path / "cache"
    process = subprocess.Popen([sys.executable, "-c", FETCH, url, str(cache)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    with process.stdout:
        for _ in range(8):
            assert process.stdout.readline(), "it ended too early"
        process.send_signal(signal.SIGKILL)
        process.wait()
    [left] = [path for path in cache.iterdir() if path.is_dir()]
    assert left.suffix == ".part"
    done = (left / ".parts").read_text().split()
    parts = asked_parts(monkeypatch)
    assert contents(fetch_model(url, cache)) == MODEL
    assert len(done) >= 4 and len(parts) + len(done) == sum(-(-len(data) // 100_001) for data in MODEL.values())


def test_a_torn_journal(bucket: Bucket, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of the journal that are cut off, wrong or of other parts are no parts that are done."""
    url, cache = bucket.put("m", MODEL), tmp_path / "cache"
    directory = fetch_model(url, cache)
    part = directory.with_name(f"{directory.name}.part")
    directory.rename(part)
    (part / "model-00001.safetensors").write_bytes(b"x" * len(WEIGHTS))
    (part / ".parts").write_bytes(b"999\n-1\nnonsense\n\n1")
    parts = asked_parts(monkeypatch)
    assert contents(fetch_model(url, cache)) == MODEL and ("model-00001.safetensors", 0) in parts


@given(done=st.lists(st.integers(0, 99)), cut=st.integers(1, 3), more=st.lists(st.integers(0, 99), min_size=1))
def test_a_journal_that_was_cut_off(done: list[int], cut: int, more: list[int]) -> None:
    """Wherever the last line was cut off, its number counts as none, now and after more was written."""
    with tempfile.TemporaryFile() as file:
        fd = file.fileno()
        text = b"".join(b"%d\n" % number for number in done)
        kept = text[:-cut] if cut < len(text) else b""
        os.pwrite(fd, kept, 0)
        whole = {int(line) for line in kept.split(b"\n")[:-1]}
        assert model_source._done(fd) == whole <= set(done)
        os.lseek(fd, 0, os.SEEK_END)
        os.write(fd, b"".join(b"%d\n" % number for number in more))
        assert model_source._done(fd) == whole | set(more)


def test_two_at_once(bucket: Bucket, tmp_path: Path, small_parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several that fetch one model at once, one fetches, and all get the whole of it."""
    url = bucket.put("m", MODEL)
    parts = asked_parts(monkeypatch)
    found: list[dict[str, bytes]] = []
    threads = [
        threading.Thread(target=lambda: found.append(contents(fetch_model(url, tmp_path / "cache")))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == [MODEL] * 4 and len(parts) == len(set(parts))


def test_changed_while_it_is_fetched(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is replaced after it was listed is an error, and nothing is published."""
    url = bucket.put("m", MODEL)
    fetch = model_source._fetch

    def changed(*given: object) -> None:
        bucket.put("m", {"config.json": b"[]"})
        fetch(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(model_source, "_fetch", changed)
    with pytest.raises(ConfigError, match=r"config\.json changed while it was fetched: start again"):
        fetch_model(url, tmp_path / "cache")
    assert all(path.suffix in (".part", ".lock") for path in (tmp_path / "cache").iterdir())


def test_no_room(bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that the disk has no room for is refused before anything is fetched, with what it needs."""
    url = bucket.put("m", MODEL)
    usage = model_source.shutil.disk_usage(tmp_path)._replace(free=2 * len(WEIGHTS))
    monkeypatch.setattr(model_source.shutil, "disk_usage", lambda path: usage)
    parts = asked_parts(monkeypatch)
    with pytest.raises(ConfigError, match=r"needs 0\.0 GiB in .* are free: make room, or set XDG_CACHE_HOME"):
        fetch_model(url, tmp_path / "cache")
    assert parts == []


def test_safetensors_only(bucket: Bucket, tmp_path: Path) -> None:
    """In secure mode pickles stay in the bucket; a model that has nothing else is refused."""
    url = bucket.put("m", MODEL | {"pytorch_model.bin": b"pickle", "deep/x.PT": b"pickle"})
    assert contents(fetch_model(url, tmp_path / "cache", is_secure=True)) == MODEL
    assert "pytorch_model.bin" in contents(fetch_model(url, tmp_path / "cache"))
    url = bucket.put("pickled", {"config.json": b"{}", "pytorch_model.bin": b"pickle"})
    with pytest.raises(ConfigError, match=r"holds no \*\.safetensors"):
        fetch_model(url, tmp_path / "cache", is_secure=True)


def test_markers_of_directories(bucket: Bucket, tmp_path: Path) -> None:
    """Empty objects by which consoles make directories are no files."""
    url = bucket.put("m", {"": b"", "adapters/": b""} | MODEL)
    assert contents(fetch_model(url, tmp_path / "cache")) == MODEL


def test_paths_stay_inside(bucket: Bucket, tmp_path: Path) -> None:
    """An object whose name leads out of the directory, or is the journal's, is refused."""
    for at, name in enumerate(("../out.json", "a/../../out", "a//b", ".parts")):
        url = bucket.put(f"m{at}", MODEL | {name: b"x"})
        with pytest.raises(ConfigError):
            fetch_model(url, tmp_path / "cache")
    assert not list(tmp_path.rglob("out*"))
    for name in ("../out", "/out", "a/../out", "a//b", "./a", "a/.parts"):  # whatever the client lets pass
        with pytest.raises(ConfigError, match="can't be a file"):
            model_source._wanted("s3://b/m", [RemoteFile(name, 1, "")], is_secure=False)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://", "write s3://BUCKET/PREFIX"),
        ("s3://user:secret@bucket/m", "holds a credential"),
        ("s3://bucket-that-is-not-there/m", "can't be read"),
        ("s3://{bucket}/archive.tar.gz", "holds no config.json"),
        ("s3://{bucket}/mod", "holds no config.json"),
    ],
)
def test_what_cant_be_read(bucket: Bucket, tmp_path: Path, url: str, expected: str) -> None:
    """A wrong address, an archive, or half of a prefix: the message says what to give, and no secret."""
    bucket.put("model", MODEL)
    bucket.ask("PUT", "/archive.tar.gz", b"gzip")
    with pytest.raises(ConfigError, match=expected) as refused:
        fetch_model(url.format(bucket=bucket.name), tmp_path / "cache")
    assert "secret" not in str(refused.value)


def test_an_unreachable_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that are refused, or nobody at the endpoint, end in one line that names what to look at."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret that nobody prints")
    monkeypatch.setattr(model_source, "_RETRY_S", 0.2)
    opened: list[dict[str, Any]] = []

    def store(*where: Any, **options: Any) -> S3Store:
        opened.append(options)
        return S3Store(*where, **options)

    monkeypatch.setattr(model_source, "S3Store", store)
    with pytest.raises(ConfigError, match="AWS_ENDPOINT_URL") as refused:
        fetch_model("s3://bucket/m", tmp_path / "cache")
    assert "\n" not in str(refused.value) and "a secret" not in str(refused.value)
    (options,) = opened  # nothing waits without an end: tries and pauses, a connection, a transfer
    assert options["retry_config"]["retry_timeout"] == timedelta(seconds=0.2)
    assert options["client_options"]["connect_timeout"] <= timedelta(seconds=10)
    assert options["client_options"]["timeout"] <= timedelta(minutes=5)


def test_a_cache_that_others_could_fill(bucket: Bucket, tmp_path: Path) -> None:
    """A directory that others can write to, or a link, is no place to load a model from."""
    url = bucket.put("m", MODEL)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("open", "link"):
        with pytest.raises(ConfigError, match="is open to other users"):
            fetch_model(url, tmp_path / name)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the model can't be kept"):
        fetch_model(url, tmp_path / "file" / "cache")


def test_where_models_are_kept() -> None:
    """In the user's cache, or where XDG_CACHE_HOME says."""
    assert model_cache({"XDG_CACHE_HOME": "/x"}) == Path("/x/hotspan/models")
    assert model_cache({}) == Path.home() / ".cache/hotspan/models"
    assert is_remote("s3://b/m") and not is_remote("org/name") and not is_remote("/s3://")


def test_what_a_server_is_started_with(bucket: Bucket, tmp_path: Path) -> None:
    """A fetched model is served from its directory, and called by the address that it was given, or by its own name."""
    url = bucket.put("m", MODEL)
    surroundings = {"XDG_CACHE_HOME": str(tmp_path)}
    options = ServeOptions(url, None, ("--seed", "1"))
    done = fetched(options, surroundings)
    assert contents(Path(done.model)) == MODEL
    assert done.engine == ("--seed", "1", "--served-model-name", url)
    named = dataclasses.replace(options, engine=("--served-model-name", "lmi"))
    assert fetched(named, surroundings).engine == named.engine
    bucket.put("m", {"pytorch_model.bin": b"pickle"})
    secure = dataclasses.replace(options, server=ServerSettings(secure=True))
    assert "pytorch_model.bin" not in contents(Path(fetched(secure, surroundings).model))
    plain = dataclasses.replace(options, model="org/name")
    assert fetched(plain, surroundings) is plain


@pytest.mark.parametrize("is_secure", [False, True])
def test_a_draft_model_in_a_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_secure: bool
) -> None:
    """A draft model is fetched as the model is; the engine gets its directory, and the rest of the configuration."""
    from hotspan.engine.arguments import parse_engine_arguments

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"pickle"}
    words = ("-sc", json.dumps({"method": "eagle", "model": bucket.put("head", files), "num_speculative_tokens": 2}))
    arguments = parse_engine_arguments("org/name", words)
    options = ServeOptions("org/name", None, words, server=ServerSettings(secure=is_secure))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        run._fetch_draft(arguments, options, Entrance([listener], Credentials(Tenants(), "token"), {}, None, None))
    directory = arguments.speculative_config.pop("model")
    wanted = {name: data for name, data in files.items() if not is_secure or "bin" not in name}
    assert contents(Path(directory)) == wanted
    assert arguments.speculative_config == {"method": "eagle", "num_speculative_tokens": 2}
