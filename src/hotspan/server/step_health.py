"""Health checks of one's own `vllm serve` that tell an engine that hangs: vLLM's own are 200 while it is there.

vllm serve MODEL --middleware hotspan.server.step_health.StepHealth
"""

import asyncio
import json
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from hotspan.config.connector import step_timeout_s
from hotspan.config.environment import environment
from hotspan.core.clock import Clock
from hotspan.core.threads import go_on
from hotspan.server.front import HEALTH, PING, STALLED
from hotspan.server.liveness import Liveness, ProcessorTime, Steps

_RETRY_S: Final = b"5"


class StepHealth:
    """ASGI middleware: /health and /ping are 503 with the reason while requests are in work and no step ends.

    `HOTSPAN_STEP_TIMEOUT_S` is how long a step may take. Everything else is vLLM's application. The engine is watched
    from the first request on.
    """

    def __init__(self, app: ASGIApp, clock: Clock | None = None) -> None:
        self._app = app
        self._clock = clock
        self._limit_s = step_timeout_s(environment())
        self._liveness: Liveness | None = None
        self._watch: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if self._liveness is None and (engine := _engine(scope)) is not None:
                self.watch(engine[0], on_cpu=engine[1])
            reason = self._liveness.reason if self._liveness is not None else None
            if reason is not None and scope["path"].removeprefix(scope.get("root_path", "")) in (HEALTH, PING):
                await _refuse(reason, send)
                return
        await self._app(scope, receive, send)

    def watch(self, engine: Steps, *, on_cpu: bool) -> Liveness:
        """Look at an engine every second from now on."""
        self._liveness = Liveness(engine, self._limit_s, ProcessorTime() if on_cpu else None, self._clock)
        self._watch = asyncio.create_task(go_on("liveness", self._liveness.watch))
        return self._liveness


def _engine(scope: Scope) -> tuple[Steps, bool] | None:
    """The engine behind vLLM's application, and whether it computes on CPU; None if it has none."""
    from hotspan.engine.client_steps import ClientSteps  # vLLM, which is there then

    state: Any = getattr(scope.get("app"), "state", None)
    client = getattr(state, "engine_client", None)
    if client is None:
        return None
    steps = ClientSteps(client)
    return steps, steps.computes_on_cpu


async def _refuse(reason: str, send: Send) -> None:
    headers = [(b"content-type", b"application/json"), (b"retry-after", _RETRY_S)]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"status": STALLED, "reason": reason}).encode()})
