"""The socket by which an engine is administered that vLLM's own server or `LLM()` runs, without an engine."""

import gc
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from hotspan.cli.admin_client import Admin
from hotspan.config.control import engine_sockets, socket_path
from hotspan.config.settings import CacheOptions
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.core.types import MIB
from hotspan.http.json_size import MAX_CONTAINERS
from hotspan.http.paths import MAX_SMALL_BYTES
from hotspan.http.unix import UnixConnection
from hotspan.server import control_serving
from hotspan.server.control import open_control
from hotspan.server.python_control import _called
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
        self.was_asked = threading.Semaphore(0)

    def ask(self, command: Mapping[str, Any]) -> Future[dict[str, Any]]:
        self.asked.append(command)
        self.was_asked.release()
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


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """What an engine core has imported long before: beside other tests it takes as long as a caller waits."""
    import hotspan.server.control_app  # noqa: F401


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


TOKEN = "a-token-of-the-administrator"


def addressed(closing: ExitStack, tmp_path: Path, core: Administrator | None = None, **parts: Any) -> int:
    """The port of an engine with `admin_address`, whose token is TOKEN."""
    file, port = tmp_path / "token", free_port()
    file.write_text(TOKEN)
    file.chmod(0o600)
    closing.callback(open_control(core or Administrator(), at_an_address(port, file, **parts)))  # type: ignore[arg-type]
    return port


def called(closing: ExitStack, port: int, said: bytes = b"") -> socket.socket:
    caller = closing.enter_context(socket.create_connection(("127.0.0.1", port), 5))
    caller.sendall(said)
    return caller


STRANGERS = """
import http.client, sys
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
import hotspan.config.control
from tests.server.test_control import addressed, called
place = Path(sys.argv[1])
hotspan.config.control.runtime_directories = lambda surroundings: (place,)
assert "fastapi" not in sys.modules
with ExitStack() as closing:
    port = addressed(closing, place)
    for _ in range(20):
        called(closing, port).close()
    caller = http.client.HTTPConnection("127.0.0.1", port)
    caller.request("GET", "/hotspan/cache")
    assert caller.getresponse().status == 401
    assert "fastapi" not in sys.modules
"""


def test_strangers_make_no_engine_import_anything_large(runtime: Path) -> None:
    """Neither connections without a byte nor requests without the token have a web framework or tokenizer imported."""
    runtime.mkdir(0o700)
    subprocess.run([sys.executable, "-c", STRANGERS, str(runtime)], check=True)


def test_probes_begin_nothing(runtime: Path, closing: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks which engines there are wakes none of them: a call afterwards is the first one."""
    served: list[int] = []
    serve = control_serving.serve

    def counted(make: Any, listener: Any, by_tcp: Any, connections: Any, ends: Any) -> None:
        served.append(sum(bool(each.recv(1, socket.MSG_PEEK)) for each in connections))
        serve(make, listener, by_tcp, connections, ends)

    monkeypatch.setattr(control_serving, "serve", counted)
    opened(closing)
    for _ in range(5):
        assert len(engine_sockets({})) == 1
    assert not served
    assert Admin(server=f"unix:{socket_path(os.getpid(), 'abcde', 0, {})}").get("/hotspan/cache")
    assert served == [1]


def test_strangers_take_few_files(runtime: Path, closing: ExitStack, tmp_path: Path) -> None:
    """An address has 16 connections at a time: a newer one takes the place of the one that waits longest."""
    port = addressed(closing, tmp_path)
    assert Admin(server=f"http://127.0.0.1:{port}", token=TOKEN).get("/hotspan/cache")
    callers = [called(closing, port, b"G") for _ in range(20)]
    for each in callers[:4]:
        with suppress(ConnectionResetError):
            assert each.recv(1) == b""
    callers[-1].sendall(b"ET / HTTP/1.1\r\nhost: h\r\n\r\n")
    assert callers[-1].recv(12) == b"HTTP/1.1 401"


def asked(closing: ExitStack, path: str = "", port: int = 0) -> httpx.Client:
    """A client of an engine's socket, or with the token of its address."""
    if port:
        given = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"authorization": f"Bearer {TOKEN}"})
    else:
        given = httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=path))
    return closing.enter_context(given)


def both(closing: ExitStack, tmp_path: Path) -> tuple[Administrator, list[httpx.Client]]:
    """An engine, and clients of both of its sockets."""
    core = Administrator()
    port = addressed(closing, tmp_path, core)
    path = socket_path(os.getpid(), "abcde", 0, {})
    return core, [asked(closing, str(path)), asked(closing, port=port)]


INVALIDATE = "/hotspan/cache/invalidate"


def test_bodies_have_the_bounds_of_a_server(runtime: Path, closing: ExitStack, tmp_path: Path) -> None:
    """Bytes, values, and their number, by what the route can need; a large batch of invalidations is none too many."""
    core, clients = both(closing, tmp_path)
    small, values = b" " * (MAX_SMALL_BYTES + 1), b'{"tokens": [' + b"[" * (MAX_CONTAINERS + 1)
    for client in clients:
        assert client.post("/hotspan/cache/pin", content=small).status_code == 413
        assert client.post("/hotspan/cache/prefetch", content=b" " * (2 * MIB)).status_code == 413
        assert client.post(INVALIDATE, content=values).status_code == 413
    assert not core.asked
    batch = {"batch": [{"tags": [f"{number}" + "x" * 500], "session": "s" * 200} for number in range(1000)]}
    for client in clients:
        assert client.post(INVALIDATE, json=batch).json()["removed"] == {"ram": 2}


def test_bodies_have_a_deadline(
    runtime: Path, closing: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that does not come ends its request."""
    monkeypatch.setattr("hotspan.server.control_app.LIMITS", replace(control_serving.LIMITS, stall_s=0.01))
    port = addressed(closing, tmp_path)
    head = f"POST {INVALIDATE} HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: 9\r\n\r\n"
    assert called(closing, port, head.encode()).recv(12) == b"HTTP/1.1 408"


COMMAND = "/control/command"


def test_commands_between_cores_are_the_sockets_alone(runtime: Path, closing: ExitStack, tmp_path: Path) -> None:
    """Who has the token gets as far as hotspan's routes lead; what is no command is a 400."""
    core, (own, by_tcp) = both(closing, tmp_path)
    told = {"command": {"do": "stats"}, "timeout_s": None}
    for path in (COMMAND, f"{COMMAND}/", "/control%2Fcommand", f"/{COMMAND}"):
        assert by_tcp.post(path, json=told, follow_redirects=True).status_code == 404
    for wrong in (
        {},
        {"command": {}, "timeout_s": 1},
        {"command": {"do": 1}, "timeout_s": 1},
        told | {"timeout_s": -1},
    ):
        assert own.post(COMMAND, json=wrong).status_code == 400
    assert own.post(COMMAND, content=b"{", headers={"content-type": "application/json"}).status_code == 400
    assert not core.asked
    assert own.post(COMMAND, json=told).json() == STATS


def test_strangers_have_one_request_a_connection(runtime: Path, closing: ExitStack, tmp_path: Path) -> None:
    """Whoever shows no token is hung up on, whatever else was sent."""
    caller = called(closing, addressed(closing, tmp_path), b"GET / HTTP/1.1\r\nhost: h\r\n\r\n" * 50)
    answer = b""
    with suppress(ConnectionResetError):
        while part := caller.recv(1 << 16):
            answer += part
    assert answer.count(b"HTTP/1.1 401") == 1 and b"connection: close" in answer


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def calling(closing: ExitStack, path: Path, method: str = "GET", route: str = "/hotspan/cache") -> UnixConnection:
    caller = UnixConnection(path, timeout_s=5)
    closing.callback(caller.close)
    caller.request(method, route)
    return caller


@pytest.mark.usefixtures("uncollected")
def test_who_waits_is_cut_off_at_the_end(runtime: Path, closing: ExitStack) -> None:
    """A call that waits for the engine, and a connection that is kept, end with the socket."""
    core, path = Administrator(), socket_path(os.getpid(), "abcde", 0, {})
    with ExitStack() as engine:
        engine.callback(open_control(core, config()))  # type: ignore[arg-type]
        idle = calling(closing, path)
        assert idle.getresponse().read()
        core.hangs = True
        waiting = calling(closing, path)
        assert core.was_asked.acquire(timeout=5) and core.was_asked.acquire(timeout=5)
    for each in (idle, waiting):
        with suppress(ConnectionResetError):
            assert each.sock.recv(1) == b""


def test_a_core_that_hangs_holds_up_no_others(runtime: Path, closing: ExitStack) -> None:
    """However many calls wait for one core, all are passed on, and none keeps another core's thread at the end."""
    there = opened(closing, 1)
    there.hangs = True
    path = socket_path(os.getpid(), "abcde", 0, {})
    with ExitStack() as engine:
        others = {*threading.enumerate()}
        opened(engine, 0)
        for _ in range(10):
            calling(closing, path, "POST", "/hotspan/cache/check")
        for _ in range(10):
            assert there.was_asked.acquire(timeout=10)
    assert {*threading.enumerate()} <= others


def test_a_core_has_a_time_to_answer(runtime: Path, monkeypatch: pytest.MonkeyPatch, closing: ExitStack) -> None:
    """Also to a check, which takes as long as reading the disk: who asked learns that one core did not answer."""
    monkeypatch.setattr("hotspan.server.control_app._LONGEST_S", 0.05)
    opened(closing, 0)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(socket_path(os.getpid(), "abcde", 1, {})))
        stopped.listen()
        with pytest.raises(RefusedError, match="a core of the engine can't be asked"):
            Admin(server=f"unix:{socket_path(os.getpid(), 'abcde', 0, {})}").post("/hotspan/cache/check", {})


def test_an_answer_that_breaks_off_is_said(runtime: Path) -> None:
    """`hotspan.control` has one error for an engine that can't be asked."""
    path = socket_path(os.getpid(), "abcde", 0, {})

    def answer() -> None:
        with listener.accept()[0] as connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{")

    with socket.socket(socket.AF_UNIX) as listener, ThreadPoolExecutor(1) as threads:
        listener.bind(str(path))
        listener.listen()
        answered = threads.submit(answer)
        with pytest.raises(ConfigError, match="can't be asked"):
            _called(path, "GET", "/hotspan/cache", None)
        answered.result()


def test_a_socket_that_can_not_be_served_is_gone(
    runtime: Path, closing: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the cause once, who calls is hung up on, and commands find no engine; the address is closed, too."""

    async def fail(*given: Any, **named: Any) -> None:
        raise OSError("no files are left")

    monkeypatch.setattr(control_serving, "listen", fail)
    port = addressed(closing, tmp_path)
    beside = called(closing, port)
    with pytest.raises(ConfigError, match="can't be asked"):
        Admin().get("/hotspan/cache")
    for thread in threading.enumerate():
        if thread.name == "hotspan-control":
            thread.join()
    assert Admin().address == "http://127.0.0.1:8080"
    assert beside.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        called(closing, port)
    assert [str(each.exc_info[1]) for each in caplog.records if each.exc_info] == ["no files are left"]


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
