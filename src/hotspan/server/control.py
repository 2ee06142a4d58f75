"""Administration of an engine that vLLM's own server or `LLM()` runs: hotspan's routes on a Unix socket of this user.

    hotspan cache --HTTP--> ControlSocket, a thread of the engine core's process --> ControlApp --> scheduler's thread

Nothing but the socket is made before the first call, which a connection without a byte is not. With `admin_address` the
same is served by TCP, for who has the admin token.
"""

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotspan.config.admin_token import admin_token
from hotspan.config.control import MAX_CONNECTIONS, ByTcp, socket_path
from hotspan.config.environment import environment
from hotspan.core.errors import ConfigError
from hotspan.core.threads import start
from hotspan.engine.plugin import offer_control
from hotspan.engine.plugin import register as register_connector
from hotspan.http.first_byte import await_byte

if TYPE_CHECKING:
    from hotspan.engine.admin import Administrator
    from hotspan.server.control_serving import Apps

logger = logging.getLogger(__name__)

_END_S = 2.0


def register() -> None:
    """Let vLLM find the connector, and open a socket in each engine core that has it. vLLM calls this in all of its
    processes, possibly more than once.
    """
    register_connector()
    offer_control(open_control)


def open_control(administrator: "Administrator", config: Any) -> Callable[[], None]:
    """Open the socket of one engine core. Without a place for it the engine runs all the same, and the log says so.

    config:  vLLM's.
    Returns: what closes it.
    Raises:  ConfigError if there is an `admin_address` that can't be had, or its token can't be used.
    """
    with contextlib.ExitStack() as opened:
        by_tcp = opened.enter_context(_by_tcp(config))
        try:
            path = socket_path(owner_process(), config.instance_id, core_rank(config), environment())
            opened.callback(ControlSocket(path, administrator, config, by_tcp).close)
        except Exception as error:  # of whatever kind, also where vLLM has other names: no start fails by it
            if by_tcp is not None:
                raise ConfigError(f"admin_address: the engine's socket can't be opened ({error})") from error
            logger.warning("administration_not_open error=%s (the engine runs without it)", error)
            return lambda: None
        logger.info("administration_open server=unix:%s", path)
        if by_tcp is not None:
            logger.info("administration_open server=http://%s:%d", *by_tcp.listener.getsockname()[:2])
        return opened.pop_all().close


@contextlib.contextmanager
def _by_tcp(config: Any) -> Iterator[ByTcp | None]:
    """The socket of `admin_address`, not yet listening; of a host's cores the first one has it. Raises: ConfigError."""
    given = config.kv_transfer_config.kv_connector_extra_config["hotspan"].get("admin")
    if given is None or (getattr(config.parallel_config, "data_parallel_rank_local", None) or 0) > 0:
        yield None
        return
    host, port, file = given["host"], given["port"], given["token_file"]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigError(f"admin_address {host}:{port} can't be had ({error.strerror}): give another") from error
        token = opened.enter_context(admin_token(port, None if file is None else Path(file), environment()))
        yield ByTcp(listener, token)


def owner_process() -> int:
    """The process that started this engine core, which may be this one."""
    owner = parent_process()
    return os.getpid() if owner is None or owner.pid is None else owner.pid


def core_rank(config: Any) -> int:
    """Of an engine's data-parallel cores, which one this is; of dense models each believes that it is the only one."""
    parallel = config.parallel_config
    return int(getattr(parallel, "data_parallel_index", parallel.data_parallel_rank))


class ControlSocket:
    """One engine core's. Serves on a thread of its own from the first connection on."""

    def __init__(self, path: Path, administrator: "Administrator", config: Any, by_tcp: ByTcp | None = None) -> None:
        self._path = path
        self._administrator = administrator
        self._config = config
        self._by_tcp = by_tcp
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ends, self._end = socket.socketpair()
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))  # in a directory that nobody else can enter
            self._listener.listen(MAX_CONNECTIONS)
            if by_tcp is not None:
                by_tcp.listener.listen(MAX_CONNECTIONS)
        except BaseException:
            self._let_go()
            raise
        self._thread = start("control", self._run)

    def close(self) -> None:
        """Take no more calls; those that wait for the engine are cut off."""
        self._end.send(b"x")
        self._thread.join(_END_S)
        self._hang_up()
        self._let_go()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """However this ends, nobody finds a socket that is not answered."""
        connections: Mapping[socket.socket, socket.socket] | None = None
        try:
            listeners = [self._listener, *([] if self._by_tcp is None else [self._by_tcp.listener])]
            connections = await_byte(listeners, self._ends, MAX_CONNECTIONS)
            if connections is not None:
                from hotspan.server.control_serving import serve  # uvicorn, which is for who sends a byte

                serve(self._apps, self._listener, self._by_tcp, connections, self._ends)
        finally:
            self._hang_up()
            for each in connections or ():
                each.close()

    def _apps(self) -> "Apps":
        from hotspan.server.control_app import CoreEngine, apps_of  # FastAPI, which is for who is let in

        return apps_of(CoreEngine(self._path, core_rank(self._config), self._administrator, self._config), self._config)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._listener.close()
        if self._by_tcp is not None:
            self._by_tcp.listener.close()

    def _let_go(self) -> None:
        for each in (self._listener, self._ends, self._end):
            each.close()
