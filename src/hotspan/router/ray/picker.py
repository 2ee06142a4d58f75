"""Tells Ray's HAProxy which replica takes a request. Answers do not come by here."""

import logging
from typing import Any

import orjson
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from hotspan.core.errors import HotspanError
from hotspan.http.bodies import Bodies
from hotspan.http.exchange import Exchange, Receive, Scope, Send
from hotspan.router.ray.policy import ASKED, Asked
from hotspan.router.ray.relay import LIMITS, live
from hotspan.router.ray.reports import HEADER
from hotspan.router.text import Prompts

logger = logging.getLogger(__name__)

_ROUTE = "/internal/route"


class Picker:
    """The app behind HAProxy's question."""

    def __init__(self, server: DeploymentHandle[Any], prompts: Prompts) -> None:
        self._server = server
        self._prompts = prompts
        self._bodies = Bodies(LIMITS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await live(receive, send)
        elif scope["type"] == "http":
            exchange = Exchange(scope, receive, send)
            if exchange.path != _ROUTE or exchange.method != "POST":
                await exchange.respond(404, b'{"error":"there is only POST /internal/route"}')
                return
            async with exchange.answered("picker"), self._bodies.body(exchange, "") as body:
                await self._answer(exchange, body)

    async def _answer(self, exchange: Exchange, body: bytes) -> None:
        ask = await self._prompts.read("", exchange.headers, body, request_id=exchange.request_id)  # without a path
        asked = Asked(ask)
        try:
            async with self._server.choose_replica(_reserve=False, **{ASKED: asked}) as chosen:
                replica = chosen._replica  # its full name and its port are not in the public part
                endpoint = replica.backend_http_endpoint
                name = replica.replica_id.to_full_id_str()
        except (HotspanError, RayError, RayServeException) as error:
            logger.warning("no_replica_chosen error=%s", type(error).__name__)
            await exchange.respond(503, b'{"error":"no replica can take a request"}')
            return
        if endpoint is None:
            await exchange.respond(503, b'{"error":"the replica listens nowhere: is HAProxy on?"}')
            return
        answer: dict[str, Any] = {"host": endpoint[0], "port": endpoint[1], "replica_id": name}
        if asked.assignment is not None:
            answer["request_headers"] = {HEADER: str(asked.assignment)}
        await exchange.respond(200, orjson.dumps(answer))
