"""Requests that every replica gets: invalidations, adapters, keys. The response contains those of all replicas.

Replicas that share an L2 share its log, which needs one entry per invalidation. So one replica gets it first; the
others get it with the place of that entry, and write none if they read the same log. One that can't be reached and is
known to read that log follows it: it gets no requests until it has.
"""

import asyncio
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

import orjson

from hotspan.core.credentials import log_name
from hotspan.http.errors import REFUSED, REQUEST
from hotspan.http.exchange import Exchange
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream, forwarded
from hotspan.router.health import ReplicaHealth

_SHOWN = 4096
_INVALIDATIONS = ("/hotspan/cache/invalidate", "/hotspan/cache/clear")
WITHDRAWING = (*_INVALIDATIONS, "/hotspan/keys/shred")
"""After which nobody may hold a text that they name."""

_LOGGED = "x-hotspan-logged"
_FIRST_S = 15.0
"""Time limit of the first replica, which answers within 10 s; after it the others are asked without its entry."""


async def fan_out(
    upstream: Upstream, health: Mapping[str, ReplicaHealth], names: Sequence[str], exchange: Exchange, body: bytes
) -> bool:
    """Send a request to all replicas, also those that are down, and respond with the responses of each.

    200 if all are 2xx, or will follow the log where an invalidation is durable (`follows`); their status if all have
    the same; else 502: it took effect at some only: repeat it. Returns whether it is 200.
    """
    headers = [(name, value) for name, value in forwarded(exchange) if name != _LOGGED]
    answers: list[dict[str, Any]] = []
    if exchange.path.rstrip("/") in _INVALIDATIONS and len(names) > 1:
        answers = [await _ask(upstream, names[0], exchange, headers, body, within_s=_FIRST_S)]
        headers += _entry(answers[0])
    asked = names[len(answers) :]
    answers += await asyncio.gather(*(_ask(upstream, name, exchange, headers, body) for name in asked))
    silent = [answer["replica"] for answer in answers if answer.pop("is_silent")]
    said: dict[str, Any] = {"replicas": answers}
    logs = [log for answer in answers if (log := _log(answer)) is not None]
    if exchange.path.rstrip("/") in _INVALIDATIONS and logs:
        said |= {"log": log_name(logs[0]["epoch"]), "generation": logs[0]["generation"]}
        said["follows"] = _followers(health, silent, said["log"], said["generation"])
    bad = (answer["replica"] for answer in answers if not 200 <= answer["status"] < 300)
    failed = [name for name in bad if name not in said.get("follows", ())]
    statuses = {answer["status"] for answer in answers}
    is_complete = not failed
    status = 200 if is_complete else statuses.pop() if len(statuses) == 1 else 502
    said = {"is_complete": is_complete} | said
    if not is_complete:
        message = (
            f"{len(failed)} of {len(names)} replicas did not do it ({', '.join(failed)}): see to them, and repeat it"
        )
        if logs:
            message += ". They are not known to read the log that has it"
        said["error"] = {"message": message, "type": "FanOutError", "param": None, "code": status}
    # For another router in front: this one is well, whatever its replicas are.
    about = {REFUSED: REQUEST} if status >= HTTPStatus.BAD_GATEWAY else {}
    await exchange.respond(status, orjson.dumps(said), headers=about)
    return is_complete


def _log(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The place where a replica wrote an invalidation; None if it shares no log, or failed."""
    body = answer["body"]
    log = body.get("log") if answer["status"] == 200 and isinstance(body, dict) and body.get("is_durable") else None
    is_place = isinstance(log, dict) and isinstance(log.get("epoch"), str) and type(log.get("generation")) is int
    return log if is_place else None


def _entry(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The header with that place, if there is one."""
    log = _log(answer)
    return [] if log is None else [(_LOGGED, f"{log['epoch']}:{log['generation']}:{log.get('namespace')}")]


def _followers(health: Mapping[str, ReplicaHealth], silent: Sequence[str], log: str, generation: int) -> list[str]:
    """Which of those without an answer read the log, as they told when they last answered; they have to from now on."""
    found = [name for name in silent if health[name].log == log]
    for name in found:
        health[name].must_read(generation)
    return found


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
        return {"replica": name, "status": 503, "body": {"error": f"no answer: {error}"}, "is_silent": True}
    return {"replica": name, "status": status, "body": _shown(content), "is_silent": False}


def _shown(content: bytes) -> Any:
    try:
        return orjson.loads(content) if content else None
    except orjson.JSONDecodeError:
        return content[:_SHOWN].decode(errors="replace")
