"""Administration of an engine that vLLM's own server or `LLM()` runs: hotspan's routes on a Unix socket of this user.

    hotspan cache --HTTP--> ControlSocket, a thread of the engine core's process --> ControlApp --> scheduler's thread

Nothing but the socket is made before the first call.
"""

import contextlib
import logging
import os
import select
import socket
from collections.abc import Callable
from multiprocessing import parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotspan.config.control import socket_path
from hotspan.config.environment import environment
from hotspan.core.threads import start
from hotspan.engine.plugin import offer_control
from hotspan.engine.plugin import register as register_connector

if TYPE_CHECKING:
    from hotspan.engine.admin import Administrator

logger = logging.getLogger(__name__)

_BACKLOG = 16
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
    """
    try:
        path = socket_path(owner_process(), config.instance_id, core_rank(config), environment())
        opened = ControlSocket(path, administrator, config)
    except Exception as error:  # of whatever kind, also where a release of vLLM's has other names: no start fails by it
        logger.warning("administration_not_open error=%s (the engine runs without it)", error)
        return lambda: None
    logger.info("administration_open server=unix:%s", path)
    return opened.close


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

    def __init__(self, path: Path, administrator: "Administrator", config: Any) -> None:
        self._path = path
        self._administrator = administrator
        self._config = config
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._ends, self._end = socket.socketpair()
        try:
            path.unlink(missing_ok=True)
            self._listener.bind(str(path))  # in a directory that nobody else can enter
            self._listener.listen(_BACKLOG)
        except BaseException:
            self._let_go()
            raise
        self._thread = start("control", self._run)

    def close(self) -> None:
        """Take no more calls; those that wait for the engine are cut off."""
        self._end.send(b"x")
        self._thread.join(_END_S)
        with contextlib.suppress(OSError):
            self._path.unlink()
        self._let_go()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        ready, _, _ = select.select([self._listener, self._ends], [], [])
        if self._ends in ready:
            return
        from hotspan.server.control_app import serve  # FastAPI, which an engine core that nobody calls does without

        rank = core_rank(self._config)
        serve(self._listener, self._ends, self._path, rank, self._administrator, self._config)

    def _let_go(self) -> None:
        for each in (self._listener, self._ends, self._end):
            each.close()
