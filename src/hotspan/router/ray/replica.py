"""One replica: an actor of Ray's that keeps a `hotspan serve` as its child."""

import asyncio
import contextlib
import subprocess
import sys
from typing import Any

import ray
from ray import serve

from hotspan.config.environment import environment
from hotspan.core.addresses import free_port
from hotspan.core.errors import EngineError
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.router.ray.plan import checked_words
from hotspan.router.ray.relay import Relay
from hotspan.router.ray.reports import Reporter
from hotspan.router.ray.scaling import QUEUE_SECONDS

_POLL_S = 0.2
_HEALTH_S = 8.0


class ServeReplica:
    """Starts a server, and is well as long as that is."""

    async def __init__(self, words: list[str], drain_s: float, startup_s: float) -> None:  # type: ignore[misc]
        """Blocks: until the model is loaded. Raises: EngineError, or ConfigError as `checked_words`.

        words: the model, and the options of `hotspan serve`.
        """
        words = checked_words(words, environment())
        port = free_port()
        command = [sys.executable, "-m", "hotspan", "serve", *words]
        command += ["--host", "127.0.0.1", "--port", str(port), "--shutdown-timeout", str(int(drain_s))]
        # Ray kills the children of an actor that ends; the guard is one, and the server its own.
        guard = [sys.executable, "-m", "hotspan.router.ray.guard", str(drain_s + 15)]
        self._process = subprocess.Popen([*guard, *command], stdin=subprocess.PIPE)
        self._url = f"http://127.0.0.1:{port}"
        name = serve.get_replica_context().replica_id.unique_id
        self._relay = Relay(self._url, Reporter(name, _nodes))
        await self._until_ready(startup_s)

    def __serve_build_asgi_app__(self) -> Relay:
        return self._relay

    async def check_health(self) -> None:
        """Raises: EngineError if Ray should start another."""
        status = self._process.poll()
        if status is not None:
            raise EngineError(f"the server ended with status {status}: its log says why")
        if not await self._relay.is_well(_HEALTH_S):
            raise EngineError(f"the server's engine does not answer within {_HEALTH_S:g} s")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """For the autoscaler."""
        return {QUEUE_SECONDS: self._relay.waiting.seconds}

    async def _until_ready(self, seconds: float) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        async with Upstream(connect_timeout_s=1.0, read_timeout_s=5.0) as upstream:
            while True:
                status = self._process.poll()
                if status is not None:
                    raise EngineError(f"hotspan serve ended with status {status}: its log says why")
                with contextlib.suppress(UnreachedError, BrokenError):
                    status, _ = await upstream.fetch(self._url, "/ping", within_s=5.0)
                    if status == 200:
                        return
                if asyncio.get_running_loop().time() > deadline:
                    self._process.terminate()
                    raise EngineError(f"hotspan serve was not ready within {seconds:g} s: give --startup-timeout-s")
                await asyncio.sleep(_POLL_S)


def _nodes() -> set[str]:
    """The addresses of the cluster's nodes."""
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {str(node["NodeManagerAddress"]) for node in nodes if node["Alive"]}
