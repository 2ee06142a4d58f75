"""The socket by which an engine is administered that vLLM's own server or `LLM()` runs, without an engine."""

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hotspan.cli.admin_client import Admin
from hotspan.config.control import engine_sockets, socket_path
from hotspan.config.settings import CacheOptions
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.server.control import open_control
from kit.ports import free_port

RECEIPT = {
    "receipt": "r",
    "at": 1.0,
    "removed": {"ram": 2},
    "requests_in_flight": 0,
    "widened": [],
    "replicas": ["a"],
    "is_durable": True,
}
STATS: dict[str, Any] = {"replica": "a", "tiers": {}, "texts": [], "hit_tokens": {}, "is_encrypted": False}


class Administrator:
    """A core's, as far as the socket asks it."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.fails = False
        self.hangs = False

    def ask(self, command: Mapping[str, Any]) -> Future[dict[str, Any]]:
        self.asked.append(command)
        answer: Future[dict[str, Any]] = Future()
        if self.hangs:
            pass
        elif self.fails:
            answer.set_exception(ValueError("the engine has no command"))
        else:
            answer.set_result(dict(STATS if command["do"] == "stats" else RECEIPT))
        return answer


def config(rank: int = 0, name: str = "abcde") -> Any:
    """vLLM's, as far as the socket asks it."""
    settings = CacheOptions(ram_gib=1.0).settings()
    model = SimpleNamespace(served_model_name="m", model="m", max_model_len=64, skip_tokenizer_init=True)
    extra = {"hotspan": settings.to_json()}
    return SimpleNamespace(
        instance_id=name,
        model_config=model,
        parallel_config=SimpleNamespace(data_parallel_index=rank, data_parallel_rank=0),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
    )


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's runtime directory of the test's own; the paths of sockets must be short."""
    with tempfile.TemporaryDirectory(prefix="run", dir="/tmp") as directory:
        found = Path(directory) / "hotspan"
        monkeypatch.setattr("hotspan.config.control.runtime_directories", lambda surroundings: (found,))
        yield found


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def opened(closing: ExitStack, rank: int = 0, name: str = "abcde") -> Administrator:
    administrator = Administrator()
    closing.callback(open_control(administrator, config(rank, name)))  # type: ignore[arg-type]
    return administrator


def test_commands_find_the_one_engine_of_this_host(runtime: Path, closing: ExitStack) -> None:
    """Without --server; what it asks is done as the administrator's."""
    core = opened(closing)
    assert Admin().address == f"unix:{runtime}/engine-{os.getpid()}-abcde-0.sock"
    assert Admin().get("/hotspan/cache")["replicas"] == [STATS]
    receipt = Admin().post("/hotspan/cache/invalidate", {"tokens": [1, 2, 3], "cache_salt": "s"})
    assert receipt["removed"] == {"ram": 2} and receipt["scope"]["tokens"] == 3
    assert core.asked[1]["tokens"] == [1, 2, 3] and core.asked[1]["cache_salt"] == "s"


def test_only_its_user_reaches_a_socket(runtime: Path, closing: ExitStack) -> None:
    """Nobody else may enter the directory; without a place of that kind the engine starts all the same."""
    opened(closing)
    assert stat.S_IMODE(runtime.stat().st_mode) == 0o700
    runtime.chmod(0o755)
    opened(closing, name="other")
    runtime.chmod(0o700)
    assert [engine.name for engine in engine_sockets({})] == ["abcde"]


def test_an_engine_starts_whose_configuration_is_another(runtime: Path) -> None:
    """A release of vLLM's without the names that the socket's path has is served without a socket."""
    other = config()
    del other.instance_id
    open_control(Administrator(), other)()  # type: ignore[arg-type]
    assert not runtime.exists()


def test_all_cores_of_an_engine_answer(runtime: Path, closing: ExitStack) -> None:
    """Whichever is asked; the receipt is that of all, and an engine beside it hears nothing."""
    cores = [opened(closing, rank) for rank in range(3)]
    other = opened(closing, 0, "other")
    url = f"unix:{socket_path(os.getpid(), 'abcde', 1, {})}"
    assert len(Admin(server=url).get("/hotspan/cache")["replicas"]) == 3
    assert Admin(server=url).post("/hotspan/cache/clear", {})["removed"] == {"ram": 6}
    assert [len(core.asked) for core in (*cores, other)] == [2, 2, 2, 0]


def test_a_core_that_fails_is_said(runtime: Path, closing: ExitStack) -> None:
    """The command has failed if one core did not do it."""
    opened(closing, 0)
    opened(closing, 1).fails = True
    with pytest.raises(RefusedError, match="the engine has no command"):
        Admin().post("/hotspan/cache/clear", {})


def test_a_core_that_makes_no_step_is_said(runtime: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its socket answers, and says that the engine does not."""
    monkeypatch.setattr("hotspan.server.admin.DURABLE_S", 0.01)
    opened(closing).hangs = True
    with pytest.raises(RefusedError, match="stalled"):
        Admin().get("/hotspan/cache")


def at_an_address(port: int, file: Path | None = None, **parts: Any) -> Any:
    """A configuration with `admin_address`."""
    found = config(**parts)
    extra = found.kv_transfer_config.kv_connector_extra_config["hotspan"]
    extra["admin"] = {"host": "127.0.0.1", "port": port, "token_file": None if file is None else str(file)}
    return found


def test_an_address_is_for_who_has_the_token(runtime: Path, closing: ExitStack, tmp_path: Path) -> None:
    """`admin_address` answers as the socket does, with the token of a file, in each way that commands take it."""
    file, port, core = tmp_path / "token", free_port(), Administrator()
    file.write_text("a-token-of-the-administrator")
    file.chmod(0o600)
    closing.callback(open_control(core, at_an_address(port, file)))  # type: ignore[arg-type]
    url = f"http://127.0.0.1:{port}"
    for refused in (Admin(server=url), Admin(server=url, token="another-token-of-somebody")):
        with pytest.raises(RefusedError, match="admin token"):
            refused.get("/hotspan/cache")
    assert not core.asked
    given = Admin(server=url, admin_token_file=file)
    assert given.get("/hotspan/cache")["replicas"] == [STATS]
    assert given.post("/hotspan/cache/clear", {})["removed"] == {"ram": 2}
    assert Admin().get("/hotspan/cache")["replicas"] == [STATS]  # the socket, which asks for none
    with httpx.Client(base_url=url) as client:
        assert client.get("/hotspan/cache").status_code == 401
        assert client.post("/hotspan/cache/clear", headers={"authorization": "Basic x"}).status_code == 401
        assert client.get("/nothing").status_code == 401  # strangers learn no routes
    assert len(core.asked) == 3


def test_a_token_is_made_for_an_address_without_one(
    runtime: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies where commands of the same user find it by the port, and goes with the engine."""
    monkeypatch.setattr("hotspan.config.admin_token.runtime_directories", lambda surroundings: (runtime,))
    port = free_port()
    with ExitStack() as engine:
        engine.callback(open_control(Administrator(), at_an_address(port)))  # type: ignore[arg-type]
        assert Admin(server=f"http://127.0.0.1:{port}").get("/hotspan/cache")["replicas"] == [STATS]
        assert stat.S_IMODE((runtime / f"{port}.token").stat().st_mode) == 0o600
    assert not list(runtime.iterdir())


def test_an_address_that_can_not_be_had_ends_the_start(runtime: Path, closing: ExitStack, tmp_path: Path) -> None:
    """Somebody has asked for it: the engine says why there is none, and does not run without."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with pytest.raises(ConfigError, match=r"admin_address 127\.0\.0\.1:\d+ can't be had"):
            open_control(Administrator(), at_an_address(other.getsockname()[1]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="admin token"):
        open_control(Administrator(), at_an_address(free_port(), tmp_path / "none"))  # type: ignore[arg-type]
    assert not runtime.exists() or not list(runtime.iterdir())


def test_of_data_parallel_cores_the_first_has_the_address(runtime: Path, closing: ExitStack) -> None:
    """It answers for all of its host, as any of their sockets does."""
    port = free_port()
    for rank in range(3):
        parts = at_an_address(port, rank=rank)
        parts.parallel_config.data_parallel_rank_local = rank
        closing.callback(open_control(Administrator(), parts))  # type: ignore[arg-type]
    token = next(runtime.glob("*.token"), None)
    found = Admin(server=f"http://127.0.0.1:{port}", admin_token_file=token).get("/hotspan/cache")
    assert len(found["replicas"]) == 3


STOPPED = """
import os, signal, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_core_whose_process_is_stopped_is_said(runtime: Path) -> None:
    """It can't answer: the command says which process does not, and that it is stopped."""
    path = socket_path(os.getpid(), "abcde", 0, {})
    process = subprocess.Popen([sys.executable, "-c", STOPPED, str(path)])
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        with pytest.raises(ConfigError, match=rf"stalled: process {process.pid} \(stopped\)"):
            Admin().get("/hotspan/cache", timeout_s=0.2)
    finally:
        process.kill()
        process.wait()


def test_of_several_engines_one_must_be_named(runtime: Path, closing: ExitStack) -> None:
    """The error has their names."""
    opened(closing, 0, "one")
    opened(closing, 0, "two")
    with pytest.raises(ConfigError, match=r"2 engines .* --server unix:\S+-one-0.sock or unix:\S+-two-0.sock"):
        Admin().get("/hotspan/cache")


def test_what_is_left_of_killed_engines_goes(runtime: Path, closing: ExitStack) -> None:
    """A socket that nobody answers is no engine; without one, a server is looked for as ever."""
    path = socket_path(1, "killed", 0, {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as killed:
        killed.bind(str(path))
        killed.listen(1)
    assert list(runtime.iterdir()) == [path]
    assert Admin().address == "http://127.0.0.1:8080"
    assert not list(runtime.iterdir())


def test_a_command_asks_one_engine(runtime: Path, closing: ExitStack) -> None:
    """The one that it found first, whichever others start while it goes on."""
    first = opened(closing)
    admin = Admin()
    admin.get("/hotspan/cache")
    second = opened(closing, name="other")
    assert len(list(runtime.iterdir())) == 2
    with pytest.raises(ConfigError, match="2 engines run on this host"):
        Admin().get("/hotspan/cache")
    admin.get("/hotspan/cache")
    assert len(first.asked) == 2 and not second.asked


def test_a_directory_with_a_long_name_is_passed_over(tmp_path: Path) -> None:
    """The kernel takes 107 bytes of a socket's path: the other directory of this user is taken."""
    session = tmp_path / ("x" * 100)
    session.mkdir()
    assert socket_path(1, "a", 0, {"XDG_RUNTIME_DIR": str(session)}).parent == Path(f"/tmp/hotspan-{os.geteuid()}")


def test_a_closed_socket_leaves_nothing(runtime: Path) -> None:
    """Neither before the first call nor after it."""
    for calls in (0, 1):
        with ExitStack() as closing:
            opened(closing)
            for _ in range(calls):
                Admin().get("/hotspan/cache")
        assert not list(runtime.iterdir())


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/hotspan/cache/invalidate", {"colour": 1}, "colour: Extra inputs are not permitted"),
        ("/hotspan/cache/invalidate", {"prompt": "x"}, "give the tokens"),
        ("/hotspan/cache/prefetch", {"messages": [{"role": "user"}]}, "give the prompt, or its tokens"),
        ("/hotspan/cache/warm", {}, "`hotspan serve` does"),
        ("/hotspan/keys/shred", {"tenant": "t"}, "no keys"),
    ],
)
def test_what_can_not_be_done_there_says_what_can(
    runtime: Path, closing: ExitStack, path: str, body: dict[str, Any], message: str
) -> None:
    """Routes of the server that an engine core can't answer, and wrong bodies."""
    opened(closing)
    with pytest.raises(RefusedError, match=message):
        Admin().post(path, body)


def test_nothing_is_imported_before_the_first_call() -> None:
    """Each process of vLLM has the module; none of them pays for a web framework that nobody asks for."""
    program = "import sys, hotspan.server.control; print(*{'fastapi', 'uvicorn', 'vllm', 'torch'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout.split() == []
