"""From the front to one model's server: the request as it came, and the answer while it is made."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

import aiohttp
from starlette.types import Scope
from yarl import URL

from hotspan.core.head import end_to_end, header_text
from hotspan.server.errors import HttpError
from hotspan.server.exchange import ClientGone, Exchange, ended
from hotspan.server.models.link import CREDENTIALS, PRINCIPAL
from hotspan.server.models.served import ServedModel
from hotspan.server.principal import current_principal

MODEL_NAME = "model_name"
"""In a query: the model that is meant. The model's server does not see it."""

_SERVER = (b"date", b"server")
_OURS = frozenset(
    name.encode() for name in ("host", "content-length", "expect", "x-request-id", PRINCIPAL, *CREDENTIALS)
)


@dataclass(frozen=True, slots=True)
class Answer:
    """All of an answer of one model's."""

    model: str
    status: int
    content: bytes


async def relay(model: ServedModel, exchange: Exchange, body: bytes) -> None:
    """Answer a request with what the model's server answers; if the client hangs up, so does this.

    Raises: HttpError if the server does not answer; ClientGone.
    """
    model.check()
    with model.asked():
        work = asyncio.create_task(_forward(model, exchange, body))
        gone = asyncio.create_task(exchange.gone.wait())
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            await work
        finally:
            gone.cancel()
            await ended(work, 0.0)


async def ask(model: ServedModel, exchange: Exchange, body: bytes) -> Answer:
    """All of what a model's server answers to this request. Raises: HttpError if it does not."""
    model.check()
    with model.asked():
        async with _asked(model, exchange, body) as answer:
            return Answer(model.name, answer.status, await answer.read())


async def _forward(model: ServedModel, exchange: Exchange, body: bytes) -> None:
    async with _asked(model, exchange, body) as answer:
        await exchange.send({"type": "http.response.start", "status": answer.status, "headers": _kept(answer)})
        async for part in answer.content.iter_any():
            await exchange.write(part)
        await exchange.write(b"", is_last=True)


@contextlib.asynccontextmanager
async def _asked(model: ServedModel, exchange: Exchange, body: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
    theirs = end_to_end(exchange.headers.raw)
    headers = [(name.decode(), header_text(value)) for name, value in theirs if name not in _OURS]
    headers += [("x-request-id", exchange.request_id), *model.link.headers(current_principal()).items()]
    try:
        async with model.session.request(
            exchange.scope["method"], _url(exchange.scope), headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            yield answer
    except (aiohttp.ClientError, OSError) as error:
        raise HttpError(
            503, f"the model {model.name} stopped while it worked on this: send it again", retry_s=1
        ) from error


def _url(scope: Scope) -> URL:
    """Where it asked for, as it was written, less the name of the model."""
    path = (scope.get("raw_path") or scope["path"].encode()).decode("latin-1")
    query = scope["query_string"].decode("latin-1")
    if MODEL_NAME in query:
        given: Sequence[tuple[str, Any]] = parse_qsl(query, keep_blank_values=True)
        query = urlencode([(name, value) for name, value in given if name != MODEL_NAME])
    return URL.build(scheme="http", host="model", path=path, query_string=query, encoded=True)


def _kept(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return [(low, value) for name, value in end_to_end(answer.raw_headers) if (low := name.lower()) not in _SERVER]
