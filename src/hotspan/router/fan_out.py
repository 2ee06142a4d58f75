"""Requests that every replica gets: invalidations, adapters, keys. The response contains those of all replicas.

Replicas that share an L2 share its log, which needs one entry per invalidation. So one replica gets it first; the
others get it with the place of that entry, and write none if they read the same log.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

import orjson

from hotspan.http.exchange import Exchange
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream, forwarded

_SHOWN = 4096
_INVALIDATIONS = ("/hotspan/cache/invalidate", "/hotspan/cache/clear")
WITHDRAWING = (*_INVALIDATIONS, "/hotspan/keys/shred")
"""After which nobody may hold a text that they name."""

_LOGGED = "x-hotspan-logged"
_FIRST_S = 15.0
"""Time limit of the first replica, which answers within 10 s; after it the others are asked without its entry."""


async def fan_out(upstream: Upstream, names: Sequence[str], exchange: Exchange, body: bytes) -> bool:
    """Send a request to all replicas, also those that are down, and respond with the responses of each.

    200 if all are 2xx; their status if all have the same; else 502: it took effect at some only: repeat it.
    Returns whether all are 2xx.
    """
    headers = [(name, value) for name, value in forwarded(exchange) if name != _LOGGED]
    answers: list[dict[str, Any]] = []
    if exchange.path.rstrip("/") in _INVALIDATIONS and len(names) > 1:
        answers = [await _ask(upstream, names[0], exchange, headers, body, within_s=_FIRST_S)]
        headers += _entry(answers[0])
    asked = names[len(answers) :]
    answers += await asyncio.gather(*(_ask(upstream, name, exchange, headers, body) for name in asked))
    statuses = {answer["status"] for answer in answers}
    is_complete = all(200 <= status < 300 for status in statuses)
    status = 200 if is_complete else statuses.pop() if len(statuses) == 1 else 502
    said: dict[str, Any] = {"is_complete": is_complete, "replicas": answers}
    if not is_complete:
        failed = [answer["replica"] for answer in answers if not 200 <= answer["status"] < 300]
        message = (
            f"{len(failed)} of {len(names)} replicas did not do it ({', '.join(failed)}): see to them, and repeat it"
        )
        said["error"] = {"message": message, "type": "FanOutError", "param": None, "code": status}
    await exchange.respond(status, orjson.dumps(said))
    return is_complete


def _entry(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The header with the place where a replica wrote an invalidation; none if it shares no log, or failed."""
    body = answer["body"]
    log = body.get("log") if answer["status"] == 200 and isinstance(body, dict) else None
    if not isinstance(log, dict):
        return []
    return [(_LOGGED, f"{log.get('epoch')}:{log.get('generation')}:{log.get('namespace')}")]


async def _ask(
    upstream: Upstream,
    name: str,
    exchange: Exchange,
    headers: list[tuple[str, str]],
    body: bytes,
    *,
    within_s: float | None = None,
) -> dict[str, Any]:
    """The response of one replica; status 503 if it sent none."""
    try:
        status, content = await upstream.fetch(
            name, exchange.target, method=exchange.method, headers=headers, body=body, within_s=within_s
        )
    except (UnreachedError, BrokenError) as error:
        return {"replica": name, "status": 503, "body": {"error": f"no answer: {error}"}}
    return {"replica": name, "status": status, "body": _shown(content)}


def _shown(content: bytes) -> Any:
    try:
        return orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        return content[:_SHOWN].decode(errors="replace")
