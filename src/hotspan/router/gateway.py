"""The HTTP router: who asks, what is asked, and who answers it.

client -> key -> body -> Ask -> proxy.py -> the best replica, or any
                      \-------> fan_out.py -> all replicas
                      \-------> here: /ping, /metrics, /router/...
"""

import asyncio
import logging
from dataclasses import dataclass

import orjson

from hotspan.core.clock import Clock
from hotspan.core.credentials import key_digest, shown_keys
from hotspan.http.bodies import Bodies
from hotspan.http.connections import HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import ClientGone, Exchange, Receive, Scope, Send
from hotspan.http.head import DECISIVE
from hotspan.http.upstream import Upstream
from hotspan.router.admin import Admin
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.fan_out import fan_out
from hotspan.router.fleet import NoReplicaError
from hotspan.router.metrics import CONTENT_TYPE, Counts, Exposition
from hotspan.router.proxy import Proxy, Reader
from hotspan.router.routes import Route, route_of
from hotspan.router.settings import RouterSettings
from hotspan.router.tenants import TenantNames
from hotspan.router.types import Ask

logger = logging.getLogger(__name__)


_NOTHING = Ask((), 0, 1.0)

_BYTES_A_TOKEN = 4

MAX_HEAD_BYTES = 60 * 1024
"""Of a request. hotspan's servers take 64 KiB, and some is added on the way to them."""


def http_limits(settings: RouterSettings) -> HttpLimits:
    """What the clients of a router may take: half is divided between the API keys, where there are any."""
    principals = max(1, len(settings.keys))
    return HttpLimits(settings.max_request_bytes, settings.held_bytes, principals)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a gateway is put together from."""

    settings: RouterSettings
    prompts: Reader
    tenants: TenantNames
    upstream: Upstream
    dispatcher: Dispatcher
    proxy: Proxy
    counts: Counts
    exposition: Exposition
    admin: Admin
    clock: Clock


class Gateway:
    """The app that is served. `drain()` stops it.

    active: requests in work. is_draining: new ones are refused.
    """

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self._parts = parts
        self._settings = settings
        self._dispatcher = parts.dispatcher
        self._counts = parts.counts
        self._upstream = parts.upstream
        self._names = [replica.url for replica in settings.replicas]
        self._bodies = Bodies(http_limits(settings))
        self._answers = {
            Route.WORK: self._work,
            Route.ONE: self._one,
            Route.ALL: self._all,
            Route.HEALTH: self._health,
            Route.METRICS: self._metrics,
            Route.ADMIN: parts.admin.answer,
        }
        named = [name for name in (settings.tenant_header, settings.session_key) if name]
        self._decisive = DECISIVE | {name.lower().encode() for name in named}
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008})
            return
        exchange = Exchange(scope, receive, send)
        route = route_of(exchange.method, exchange.path)
        self.active += 1
        self._idle.clear()
        outcome = "failed"
        try:
            exchange.check(self._decisive, MAX_HEAD_BYTES)
            self._check_key(exchange, route)
            outcome = await self._answers[route](exchange)
        except ClientGone:
            outcome = "gone"
        except NoReplicaError:
            outcome = "no_replica"
            await exchange.fail(HttpError(503, "no replica can take this now: try again", retry_s=1))
        except HttpError as error:
            outcome = "refused"
            await exchange.fail(error)
        except Exception:  # the boundary of every request
            await exchange.crashed("router")
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()
            self._counts.request(route.value, outcome)

    def drain(self) -> None:
        """Refuse what computes from now on; what is in work goes on."""
        self.is_draining = True

    async def drained(self, within_s: float) -> bool:
        """Whether all requests have ended, by `within_s` at the latest."""
        try:
            async with asyncio.timeout(within_s):
                await self._idle.wait()
        except TimeoutError:
            logger.warning("drain_overdue requests=%d: they are cut off", self.active)
            return False
        return True

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _work(self, exchange: Exchange) -> str:
        """By the best replica."""
        if self.is_draining:
            raise HttpError(503, "the router stops: send this to another one, or try again", retry_s=1)
        began_s = self._parts.clock.monotonic()
        async with self._bodies.body(exchange, self._owner(exchange)) as body, exchange.watched(is_cancelled=True):
            return await self._parts.proxy.forward(exchange, body, self._ask(exchange, body), began_s)

    async def _one(self, exchange: Exchange) -> str:
        """By any replica."""
        async with self._bodies.body(exchange, self._owner(exchange)) as body, exchange.watched(is_cancelled=True):
            return await self._parts.proxy.forward(exchange, body, _NOTHING, self._parts.clock.monotonic())

    async def _all(self, exchange: Exchange) -> str:
        """By every replica; it goes on to its end also if the client hangs up."""
        async with self._bodies.body(exchange, self._owner(exchange)) as body:
            # Those that are up come first: the first is asked before the others.
            names = sorted(self._names, key=lambda name: name not in self._dispatcher.up)
            is_complete = await fan_out(self._upstream, names, exchange, body)
        outcome = "complete" if is_complete else "incomplete"
        self._counts.fan_outs[outcome,] = self._counts.fan_outs.get((outcome,), 0) + 1
        return outcome

    async def _health(self, exchange: Exchange) -> str:
        """Whether requests may be sent here."""
        if self.is_draining:
            await exchange.respond(503, b'{"status":"Draining"}')
        elif not self._dispatcher.up:
            await exchange.respond(503, b'{"status":"Unhealthy"}')
        else:
            await exchange.respond(200, b'{"status":"Healthy"}')
        return "answered"

    async def _metrics(self, exchange: Exchange) -> str:
        settings = self._settings
        if settings.keys or settings.admin_token is not None:
            self._parts.admin.check(exchange)
        await exchange.respond(200, self._parts.exposition.page(), CONTENT_TYPE)
        return "answered"

    # -- what is asked -------------------------------------------------------------------------------------------------

    def _check_key(self, exchange: Exchange, route: Route) -> None:
        """Raises: HttpError 401 if keys are needed and this is none. Administration is checked where it is answered."""
        keys = self._settings.keys
        if not keys or route in (Route.HEALTH, Route.METRICS, Route.ADMIN):
            return
        if not self._owner(exchange):
            message = "this router needs a valid API key: send `Authorization: Bearer KEY`"
            raise HttpError(401, message, code="invalid_api_key")

    def _owner(self, exchange: Exchange) -> bytes:
        """The digest of the request's key, by which its body takes memory; empty if it shows no known one."""
        digests = map(key_digest, shown_keys(exchange.headers))
        return next((digest for digest in digests if digest in self._settings.keys), b"")

    def _ask(self, exchange: Exchange, body: bytes) -> Ask:
        """What the choice depends on; where it can't be told, the size alone."""
        headers = exchange.headers
        tenant = self._parts.tenants.of(headers)
        try:
            parsed = orjson.loads(body) if body[:16].lstrip().startswith(b"{") else None
            if isinstance(parsed, dict):
                return self._parts.prompts.ask(exchange.path, headers, parsed, tenant=tenant)
        except orjson.JSONDecodeError:
            pass  # the replica says what is wrong with it
        except Exception:  # a prompt is the client's to write: whatever it is, a replica answers it
            logger.warning("prompt_unread request=%s path=%s", exchange.request_id, exchange.path, exc_info=True)
        self._counts.learn_failures += 1
        return Ask((), len(body) // _BYTES_A_TOKEN, 1.0, tenant=tenant)
