"""What a start says of tiers that it can't use, or finds nothing in; it fails by neither."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from subprocess import run
from unittest.mock import patch

import pytest

from hotspan.config.settings import L2Settings
from hotspan.l2 import written_under
from kit.ports import free_port
from kit.redis_server import RedisServer
from kit.s3_server import CLIENT
from kit.simulated.memory_store import MemoryServer
from kit.waiting import until
from tests.tiers.mounts import mounted

from .harness.core import CHUNK, Core, core

TOKENS = 1000
WHOLE = TOKENS // CHUNK * CHUNK

STORES = ["no Redis", "a Redis that writes nothing", "S3 that answers 403", "no S3", "a read-only mount", "a file"]


class Forbids(BaseHTTPRequestHandler):
    """403 to all requests, as S3 says it."""

    def answer(self) -> None:
        body = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send_response(403)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *arguments: object) -> None:
        """Nothing."""


def s3(port: int) -> L2Settings:
    client = CLIENT | {"secret_access_key": "env:OF_A_BUCKET", "endpoint": f"http://127.0.0.1:{port}"}
    return L2Settings("s3://bucket/l2", client | {"timeout_s": "1"})


@contextmanager
def settings_of(which: str, directory: Path) -> Iterator[L2Settings]:
    """An L2 that can't be used."""
    with ExitStack() as stack:
        match which:
            case "no Redis":
                yield L2Settings(f"redis://127.0.0.1:{free_port()}")
            case "a Redis that writes nothing":
                server = RedisServer(directory, "--replicaof", "127.0.0.1", str(free_port()))
                server.start()
                stack.callback(server.stop)
                yield L2Settings(server.url)
            case "no S3":
                yield s3(free_port())
            case "S3 that answers 403":
                forbids = ThreadingHTTPServer(("127.0.0.1", 0), Forbids)
                serving = threading.Thread(target=forbids.serve_forever, daemon=True)
                serving.start()
                stack.callback(forbids.server_close)
                stack.callback(forbids.shutdown)
                yield s3(forbids.server_address[1])
            case "a read-only mount":
                mount = stack.enter_context(mounted(directory / "mount", "tmpfs", "size=8m"))
                run(["mount", "-o", "remount,ro", mount], check=True)
                yield L2Settings((mount / "l2").as_uri())
            case _:
                (directory / "file").write_text("")
                yield L2Settings((directory / "file" / "l2").as_uri())


@pytest.mark.parametrize("which", STORES)
def test_an_l2_that_can_not_be_used_fails_no_start(
    which: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engine starts and answers, from RAM and the disk as without an L2, and the log says once why that is off."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OF_A_BUCKET", CLIENT["secret_access_key"])
    monkeypatch.setattr(written_under, "AGAIN_S", 0.05)
    with settings_of(which, tmp_path) as l2, core(tiny_model, disk=tmp_path / "kv", cache={"l2": l2}) as engine:
        for seed in (1, 2):  # the first one perhaps before anything was said
            text = engine.text(seed, TOKENS)
            assert engine.ask(text) == 0 and engine.ask(text) > 0
            until(lambda: any("l2_not_reached" in said for said in caplog.messages))
        engine.check()
    assert sum("l2_not_reached" in said for said in caplog.messages) == 1
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_an_l2_that_comes_is_used_and_says_what_it_was_written_under(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An engine that started without its Redis uses it once that is there; a start with another option names that."""
    monkeypatch.setattr(written_under, "AGAIN_S", 0.05)
    server = RedisServer(tmp_path)
    l2 = L2Settings(server.url)
    with core(tiny_model, cache={"l2": l2}) as engine:
        engine.ask(engine.text(1, TOKENS))
        until(lambda: any("l2_not_reached" in said for said in caplog.messages))
        server.start()
        try:
            text = _shared(engine, server)
            until(lambda: server.ask("EXISTS", "hotspan:2:names:{written}") == b":1\r\n")
            with core(tiny_model, cache={"l2": l2}) as second:
                assert second.ask(text) == WHOLE
            with core(tiny_model, cache={"l2": l2, "chunk_tokens": 2 * CHUNK}) as other:
                assert other.ask(text) == 0
                until(lambda: any("l2_written_under_other_names" in said for said in caplog.messages))
        finally:
            server.stop()
    (said,) = [said for said in caplog.messages if "l2_written_under_other_names" in said]
    assert f"chunk_tokens ({CHUNK} then, {2 * CHUNK} now)" in said


def _shared(engine: Core, server: RedisServer) -> list[int]:
    """A text that the engine stored in the server; not the first one, which may have come before the log was read."""
    rises = 0
    for seed in range(2, 1000):
        before, text = _objects(server), engine.stored(engine.text(seed, TOKENS))
        rises += _objects(server) >= before + WHOLE // CHUNK
        if rises == 2:
            return text
    raise AssertionError("nothing was stored")


def _objects(server: RedisServer) -> int:
    return server.ask("KEYS", "hotspan:2:objects:*").count(b"hotspan:")


@pytest.mark.parametrize("seed", ["0", "1"])
def test_a_disk_says_why_it_is_cold(
    seed: str, tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start with another PYTHONHASHSEED finds nothing on a disk, and names it; one with the same says nothing."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        text = engine.stored(engine.text(1, TOKENS))
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(text) == (WHOLE if seed == "0" else 0)
    said = [message for message in caplog.messages if "disk_written_under_other_names" in message]
    assert [message.endswith("what differs: PYTHONHASHSEED") for message in said] == [True] * (seed != "0")


def test_names_in_a_store_that_fails_hold_no_start_up(tiny_model: Path) -> None:
    """The names are read on a thread of their own: a store that does not answer keeps no engine from serving."""
    server, hangs = MemoryServer(), threading.Event()
    server.before = lambda call: hangs.wait(600) and None if call == "read names" else None
    with patch.object(written_under, "AGAIN_S", 0.05), core(tiny_model, l2=server) as engine:
        text = engine.stored(engine.text(1, TOKENS))
        assert engine.ask(text) > 0 and "names/written" not in server.data
        hangs.set()
        until(lambda: "names/written" in server.data)
