"""The router's own routes, for who runs it: what it knows of its replicas, and taking one out and back.

GET /router/replicas      POST /router/replicas/drain, /router/replicas/resume  {"replica": URL}
"""

import hmac
import ipaddress
from collections.abc import Mapping
from typing import Any

import orjson

from hotspan.core.credentials import key_digest, shown_keys
from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON, Exchange
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.fleet import Fleet
from hotspan.router.health import ReplicaHealth
from hotspan.router.health_checks import HealthChecks
from hotspan.router.settings import Replica

_REPLICAS, _DRAIN, _RESUME = "/router/replicas", "/router/replicas/drain", "/router/replicas/resume"
_MAX_BYTES = 1 << 16
_PROXIES = ("forwarded", "x-forwarded-for", "x-real-ip")


class Admin:
    """Answers them. token: None lets in this machine only."""

    def __init__(
        self,
        token: str | None,
        replicas: Mapping[str, Replica],
        fleet: Fleet,
        replica_health: Mapping[str, ReplicaHealth],
        dispatcher: Dispatcher,
        checks: HealthChecks,
    ) -> None:
        self._token = token
        self._replicas = replicas
        self._fleet = fleet
        self._replica_health = replica_health
        self._dispatcher = dispatcher
        self._checks = checks

    def check(self, exchange: Exchange) -> None:
        """Raise HttpError 401 or 403 unless it is the administrator who asks."""
        if self._token is None:
            if not _is_local(exchange):
                message = "administration is for this machine only: start the router with --admin-token-file"
                raise HttpError(403, message, code="permission_denied")
            return
        wanted = key_digest(self._token)
        if not any(hmac.compare_digest(key_digest(shown), wanted) for shown in shown_keys(exchange.headers)):
            message = "this is for the administrator: send `Authorization: Bearer ADMIN_TOKEN`"
            raise HttpError(401, message, code="invalid_api_key")

    async def answer(self, exchange: Exchange) -> str:
        """Answer one request. Raises: HttpError."""
        self.check(exchange)
        path, method = exchange.path.rstrip("/"), exchange.method
        if path == _REPLICAS and method == "GET":
            await exchange.respond(200, orjson.dumps({"replicas": [self._shown(name) for name in self._replicas]}))
        elif path in (_DRAIN, _RESUME) and method == "POST":
            name = await self._named(exchange)
            self._checks.drain(name, is_drained=path == _DRAIN)
            await exchange.respond(200, orjson.dumps(self._shown(name)))
        else:
            raise HttpError(404, f"there are GET {_REPLICAS}, POST {_DRAIN} and POST {_RESUME}")
        return "answered"

    def _shown(self, name: str) -> dict[str, Any]:
        replica_health, load = self._replica_health[name], self._fleet.replicas[name]
        return {
            "replica": name,
            "group": self._replicas[name].group,
            "can_take": replica_health.can_take,
            "health": replica_health.health.value,
            "breaker": replica_health.breaker.state.value,
            "is_drained": replica_health.is_drained,
            "in_flight": self._dispatcher.in_flight[name],
            "is_exact": self._fleet.is_exact(name),
            "tokens_per_s": round(load.tokens_per_s, 1),
        }

    async def _named(self, exchange: Exchange) -> str:
        """The replica that a body names. A page of another site can't send JSON unasked."""
        if exchange.headers.get("content-type", "").partition(";")[0].strip() != JSON:
            raise HttpError(415, f"send {JSON}")
        body, more = b"", True
        while more and len(body) <= _MAX_BYTES:
            part, more = await exchange.part()
            body += part
        try:
            asked = orjson.loads(body)
            name = asked["replica"]
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            raise HttpError(400, 'which replica? Send {"replica": URL}') from error
        if name not in self._replicas:
            raise HttpError(404, f"there is no replica {str(name)[:200]!r}: there are {', '.join(self._replicas)}")
        return str(name)


def _is_local(exchange: Exchange) -> bool:
    """Whether this machine asks, and not for somebody else."""
    client = exchange.scope.get("client")
    if client is None or any(name in exchange.headers for name in _PROXIES):
        return False
    try:
        return ipaddress.ip_address(client[0].partition("%")[0]).is_loopback
    except ValueError:
        return False
