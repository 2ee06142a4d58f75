"""`hotspan cache invalidate --l2` and `--directory`: a receipt is of an L2 that replicas use, or there is none."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import obstore
import pytest
from obstore.store import S3Store as ObstoreS3
from typer.testing import CliRunner

from hotspan.cli.cache import cache
from hotspan.config.secrets import resolved
from hotspan.core.types import MIB
from hotspan.l2.base import ObjectStore
from hotspan.l2.open import open_store
from hotspan.testing.chunks import chain
from kit.redis_server import redis_server
from kit.s3_server import CLIENT, S3Server
from tests.l2.kit.logs import log_of
from tests.l2.kit.stores import put

BUCKET = "hotspan"


class Place(NamedTuple):
    """An L2 that no replica has used yet. left: the names of what is there."""

    url: str
    options: dict[str, str]
    left: Callable[[], list[str]]

    def open(self) -> ObjectStore:
        return open_store("--l2", self.url, resolved(self.options, {}))


@pytest.fixture(params=["file", "redis", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    if request.param == "file":
        yield Place((tmp_path / "mnt" / "hotspan").as_uri(), {}, lambda: names_below(tmp_path))
    elif request.param == "redis":
        with redis_server(tmp_path) as server:
            yield Place(server.url, {}, lambda: server.ask("KEYS", "*").decode().split("\r\n")[2::2])
    else:
        with S3Server(BUCKET) as server:
            (tmp_path / "secret").write_text(CLIENT["secret_access_key"])
            (tmp_path / "secret").chmod(0o600)
            bucket = ObstoreS3(BUCKET, config=CLIENT | {"endpoint": server.url}, client_options={"allow_http": True})  # type: ignore[arg-type]
            options = CLIENT | {"endpoint": server.url, "secret_access_key": f"file:{tmp_path / 'secret'}"}
            listed = lambda: [meta["path"] for page in obstore.list(bucket) for meta in page]  # noqa: E731
            yield Place(f"s3://{BUCKET}/of/replicas", options, listed)


def names_below(path: Path) -> list[str]:
    return sorted(str(each.relative_to(path)) for each in path.rglob("*"))


def invalidate(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(cache, ["invalidate", *words, "--tag", "a"], env={"COLUMNS": "500"})
    return done.exit_code, done.output


def in_l2(place: Place, *words: str) -> tuple[int, str]:
    return invalidate(
        "--l2", place.url, *(f"--l2-option={name}={value}" for name, value in place.options.items()), *words
    )


def test_a_place_that_no_replica_uses_gives_no_receipt(place: Place) -> None:
    """Exit status 2, and nothing is there that was not before: twice, since the first must not make it an L2."""
    for _ in range(2):
        status, output = in_l2(place)
        assert status == 2 and "there is no L2 here" in output and "durable" not in output, output
        assert place.left() == []


def test_who_follows_is_told(place: Place) -> None:
    """Of an L2 without a replica now it is said that none follows; of one with replicas, how many and which."""
    with closing(place.open()) as store:
        put(store, chain("a", 1)[0], MIB)
        status, output = in_l2(place)
        assert status == 0 and "durable" in output and "no replica follows this log now" in output, output
        assert "give their URL" in output
        log_of(store).report("late", 1, 60)
        log_of(store).report("reads", 2**40 + 2**39 + 2**38, 60)
        status, output = in_l2(place)
        assert status == 0 and "replicas that follow this log now: 2; read by" in output, output
        assert "late has not read it yet" in output
        status, output = in_l2(place, "--json")
        assert status == 0 and "late" in json.loads(output)["replicas_missing"], output


def test_a_directory_of_others_is_neither_disk_nor_l2(tmp_path: Path) -> None:
    """Files that happen to have the names of an L2's stay as they are; a subdirectory of an L2 is no place either."""
    for name in ("epochs/epoch_1.pt", "log/today.txt", "objects/a", "replicas/one"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("ours")
    before = names_below(tmp_path)
    for words in (("--l2", tmp_path.as_uri()), ("--directory", str(tmp_path))):
        status, output = invalidate(*words)
        assert status == 2 and "there is no L2 here" in output, output
    for name in ("log", "objects"):
        status, output = invalidate("--directory", str(tmp_path / name))
        assert status == 2 and "no disk tier's directory" in output, output
    assert names_below(tmp_path) == before


def test_an_l2_with_a_table_in_it_is_not_taken_for_a_disk(tmp_path: Path) -> None:
    """What is there could be either: the caller has to say which."""
    with closing(open_store("--l2", tmp_path.as_uri(), {})) as store:
        log_of(store).read(0)
    assert invalidate("--directory", str(tmp_path))[0] == 0
    (tmp_path / "table").write_bytes(bytes(4096))
    status, output = invalidate("--directory", str(tmp_path))
    assert status == 2 and f"--l2 file://{tmp_path}" in output, output
