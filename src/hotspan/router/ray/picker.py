"""Tells Ray's HAProxy which replica takes a request. Answers do not come by here."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from hotspan.core.errors import HotspanError
from hotspan.http.bodies import Bodies
from hotspan.http.exchange import Exchange, Receive, Scope, Send
from hotspan.router.prompt import Prompt
from hotspan.router.ray.policy import ASKED, Asked
from hotspan.router.ray.relay import LIMITS, live
from hotspan.router.ray.reports import HEADER
from hotspan.router.session import session_key
from hotspan.router.types import Ask

logger = logging.getLogger(__name__)

Reader = Callable[[str, Mapping[str, str], Mapping[str, Any]], Ask]

_ROUTE = "/internal/route"
_BYTES_PER_TOKEN = 4


class Picker:
    """The app behind HAProxy's question."""

    def __init__(self, server: DeploymentHandle[Any], read: Reader) -> None:
        """read: a request -> what the choice depends on."""
        self._server = server
        self._read = read
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
        asked = Asked(self._ask(exchange.headers, body))
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

    def _ask(self, headers: Mapping[str, str], body: bytes) -> Ask:
        """What the choice depends on; of a body that can't be read, how long it is."""
        with contextlib.suppress(orjson.JSONDecodeError):
            parsed = orjson.loads(body)
            if isinstance(parsed, dict):
                return self._read(_path(parsed), headers, parsed)
        return Ask((), len(body) // _BYTES_PER_TOKEN, 1.0, session=session_key(headers, {}, Prompt()))


def _path(body: Mapping[str, Any]) -> str:
    """HAProxy hands over bodies without their paths; what is in one tells."""
    if "messages" in body:
        return "/v1/chat/completions"
    return "/v1/completions" if "prompt" in body else "/invocations"
