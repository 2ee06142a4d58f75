"""Relays a request from the store's front to one model's server, and streams its response."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode

from hotspan.http.errors import MODEL, HttpError
from hotspan.http.exchange import ClientGone, Exchange
from hotspan.http.upstream import BrokenError, UnreachedError, UpstreamResponse, sendable
from hotspan.http.upstream import relay as relayed
from hotspan.server.exchange import ended
from hotspan.server.models.served import ServedModel
from hotspan.server.principal import CREDENTIALS, PRINCIPAL, current_principal

MODEL_NAME = "model_name"
"""In a query: the model that is meant. The model's server does not see it."""

_SERVER = (b"date", b"server")
_OURS = frozenset(
    name.encode() for name in ("host", "content-length", "expect", "x-request-id", PRINCIPAL, *CREDENTIALS)
)


@dataclass(frozen=True, slots=True)
class ModelAnswer:
    """The whole response of one model."""

    model: str
    status: int
    content: bytes


async def relay(model: ServedModel, exchange: Exchange, body: bytes) -> None:
    """Answer a request with the response of the model's server; its connection is closed if the client's is.

    Raises: HttpError if the server does not answer; ClientGone.
    """
    work = asyncio.create_task(_relay(model, exchange, body))
    gone = asyncio.create_task(exchange.gone.wait())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientGone
        await work
    finally:
        gone.cancel()
        await ended(work, 0.0)


async def ask(model: ServedModel, exchange: Exchange, body: bytes) -> ModelAnswer:
    """The whole response of a model's server to this request. Raises: HttpError if there is none."""
    async with _asked(model, exchange, body) as response:
        return ModelAnswer(model.name, response.status, await response.whole(_MAX_ANSWER_BYTES))


async def _relay(model: ServedModel, exchange: Exchange, body: bytes) -> None:
    async with _asked(model, exchange, body) as response:
        headers = [(name.lower(), value) for name, value in response.headers if name.lower() not in _SERVER]
        await relayed(exchange, response, headers, await response.part())


@contextlib.asynccontextmanager
async def _asked(model: ServedModel, exchange: Exchange, body: bytes) -> AsyncIterator[UpstreamResponse]:
    model.check()
    headers = [*sendable(exchange, _OURS), ("x-request-id", exchange.request_id)]
    headers += model.link.headers(current_principal()).items()
    with model.asked():
        try:
            response = await model.ask(exchange.method, _target(exchange), headers, body)
            with contextlib.closing(response):
                yield response
        except (UnreachedError, BrokenError) as error:
            raise HttpError(
                503, f"the model {model.name} stopped while it worked on this: send it again", retry_s=1, about=MODEL
            ) from error


def _target(exchange: Exchange) -> str:
    """The target as it was sent, without the name of the model."""
    path, _, query = exchange.target.partition("?")
    if MODEL_NAME in query:
        query = urlencode([pair for pair in parse_qsl(query, keep_blank_values=True) if pair[0] != MODEL_NAME])
    return f"{path}?{query}" if query else path


_MAX_ANSWER_BYTES = 256 << 20
"""Of a response that is merged with others, such as metrics."""
