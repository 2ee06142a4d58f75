"""The ranks of a further host: `hotspan serve --headless --node-rank 1`, beside the host with the server."""

import contextlib
import logging
import os
import signal
import socket
from argparse import Namespace
from collections.abc import Iterator

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from hotspan.core.aftermath import Aftermath, undisturbed
from hotspan.core.errors import ConfigError, EngineError
from hotspan.core.threads import start
from hotspan.engine.launch import first_line, told

logger = logging.getLogger(__name__)

_KEEPALIVE_S = 10
"""A host that is gone without a word is noticed after a few of these."""


def run_ranks(arguments: Namespace, aftermath: Aftermath) -> None:
    """Run this host's ranks of an engine (engine/arguments.py) until they, or the host with the server, have ended.

    aftermath: ends their processes if this one is killed.

    Blocks: for their life.
    Raises: ConfigError where vLLM refuses the configuration; EngineError where ranks do not come up, or end.
    """
    engine_arguments = AsyncEngineArgs.from_cli_args(arguments)
    try:
        config = engine_arguments.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"the engine refuses this configuration: {first_line(error)}") from error
    try:
        with told(aftermath):
            executor = MultiprocExecutor(config, monitor_workers=False)
    except (RuntimeError, OSError) as error:
        raise EngineError(
            f"this host's ranks did not start: {first_line(error)} (the log above has the cause)"
        ) from error
    parallel = config.parallel_config
    logger.info("ranks_started node_rank=%d head=%s:%d", parallel.node_rank, parallel.master_addr, parallel.master_port)
    try:
        with _ended_with(parallel.master_addr, parallel.master_port):
            executor.start_worker_monitor(inline=True)
    finally:
        # A rank that waits for the other host ignores SIGTERM; a signal here would leave before it is killed.
        with undisturbed():
            executor.shutdown()
    raise EngineError("this host's ranks ended: the log above says why. Start all hosts of the engine again")


@contextlib.contextmanager
def _ended_with(address: str, port: int) -> Iterator[None]:
    """Send this process SIGTERM once the process that coordinates all ranks, on the server's host, has ended.

    The ranks here would wait for its next step for ever, and a server that starts again can't use them.
    """
    with socket.create_connection((address, port), timeout=_KEEPALIVE_S) as head:
        head.settimeout(None)
        head.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
            head.setsockopt(socket.IPPROTO_TCP, option, _KEEPALIVE_S)
        is_left = False

        def watch() -> None:
            with contextlib.suppress(OSError):
                while head.recv(4096):
                    pass
            if not is_left:
                logger.warning("head_ended: the host with the server has ended or is out of reach: its ranks here end")
                os.kill(os.getpid(), signal.SIGTERM)

        start("head", watch)
        try:
            yield
        finally:
            is_left = True
            with contextlib.suppress(OSError):
                head.shutdown(socket.SHUT_RDWR)
