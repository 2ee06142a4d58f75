"""The HTTP router: all its parts, and which of them answers a request.

client -> key -> body -> Ask -> proxy.py -> the best replica, or any
                      \-------> fan_out.py -> all replicas
                      \-------> here: /ping, /metrics, /router/...
"""

import asyncio
import contextlib
import functools
import logging
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import orjson

from hotspan.config.kv_events import CurveKeys
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.threads import go_on
from hotspan.http.bodies import ROUTE_NEEDS, Bodies, HeldBody
from hotspan.http.dashboard import HTML, dashboard
from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON, ClientGone, Exchange, Receive, Scope, Send
from hotspan.http.head import DECISIVE
from hotspan.http.paths import AUDIO, MAX_SMALL_BYTES, is_small
from hotspan.http.upstream import Upstream, forwarded
from hotspan.router.blocks import Blocks
from hotspan.router.caches import FleetCaches
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.event_sync import EventSync
from hotspan.router.events import EventFeed
from hotspan.router.fan_out import WITHDRAWING, fan_out
from hotspan.router.fleet import Fleet, NoReplicaError
from hotspan.router.health import HealthState, ReplicaHealth
from hotspan.router.index import PrefixIndex
from hotspan.router.measured import follow_metrics
from hotspan.router.metrics import CONTENT_TYPE, Metrics, State
from hotspan.router.models import LIST, ServedModels, union
from hotspan.router.parts import access_of, http_limits, prompts_of
from hotspan.router.policy import Weights
from hotspan.router.proxy import Proxy
from hotspan.router.routes import (
    CACHE,
    CANARY,
    DRAIN,
    MODELS,
    OWN_ROUTES,
    REPLICAS,
    RESET,
    RESUME,
    Route,
    response_of,
    route_of,
)
from hotspan.router.session import StatefulSessions
from hotspan.router.settings import Replica, RouterSettings
from hotspan.router.shadow import Shadows
from hotspan.router.tracing import Tracer, no_tracer
from hotspan.router.types import Ask

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 60 * 1024
"""Of a request. hotspan's servers take 64 KiB, and some is added on the way to them."""

_OF_LIST = frozenset(("accept-encoding", "if-none-match", "if-modified-since", "range"))
"""Headers of a client that would change the form of a list of models, or leave it out."""

_ADMIN = b"admin"
"""Owner of the administrator's bodies; clients' are digests of keys."""


class Gateway:
    """The app that is served. `drain()` stops it.

    active: requests in work. is_draining: new ones are refused.
    """

    def __init__(
        self,
        settings: RouterSettings,
        upstream: Upstream,
        *,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        tracer: Tracer = no_tracer,
    ) -> None:
        """Raises: ConfigError, as `TokenTable.load`, and for events that can't be read without a model's tokens."""
        self._clock = clock = clock or SystemClock()
        rng = rng or random.Random()
        self._upstream = upstream
        self._replicas = {replica.url: replica for replica in settings.replicas}
        self._access = access_of(settings)
        self._bodies = Bodies(http_limits(settings))
        named = [name for name in (settings.tenant_header, settings.session_key) if name]
        self._decisive = DECISIVE | {name.lower().encode() for name in named}
        index, weights = PrefixIndex(settings.index_bytes), Weights(threshold=settings.threshold)
        self.fleet = Fleet(strategy=settings.strategy, index=index, clock=clock, rng=rng, weights=weights)
        self.dispatcher = Dispatcher(
            self.fleet,
            max_in_flight=settings.max_in_flight,
            queue_size=settings.queue_size,
            queue_timeout_s=settings.queue_timeout_s,
            on_take=lambda name: self.health[name].took(),
        )
        self.health = {
            url: ReplicaHealth(url, settings.health, clock, rng, self._health_changed) for url in self._replicas
        }
        self._models = ServedModels(self._replicas, upstream, clock)
        self._caches = FleetCaches(
            self._replicas, upstream, lambda name: self.health[name].health is HealthState.DOWN, clock
        )
        self._prompts = prompts_of(settings, self._access)
        self.feeds: dict[str, EventFeed] = {}
        for replica in settings.replicas:
            self._add(replica, rng, settings.events_keys)
        sessions = StatefulSessions(clock)
        self._metrics = metrics = Metrics(settings.strategy, settings.group_shares)
        state = State(self.fleet, self.health, self.dispatcher, sessions, self._prompts, self.feeds)
        metrics.registry.register(state)
        self.shadows = Shadows(settings, upstream, self.fleet, self.health, rng)
        metrics.registry.register(self.shadows)
        self._proxy = Proxy(
            *(settings, self._prompts, upstream, self.fleet, self.dispatcher, self.health, sessions, metrics, tracer),
            *(self.shadows, self._models),
        )
        self._idle = asyncio.Event()
        self._idle.set()
        self.is_draining = False
        self.active = 0

    def _add(self, replica: Replica, rng: random.Random, keys: CurveKeys | None) -> None:
        """Take a replica into the fleet, not yet up."""
        slot = self.fleet.add(replica.url)
        self.fleet.set_up(replica.url, False)
        if replica.events:
            blocks = Blocks(self._prompts.join, self._prompts.roots.of_engine)
            on_state = functools.partial(self._events_changed, replica.url)
            sync = EventSync(slot, blocks, self.fleet.index, on_state)
            self.feeds[replica.url] = EventFeed(sync, replica.events, replica.replay, rng=rng, keys=keys)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Check the replicas once; inside, follow their health, KV events and metrics."""
        await asyncio.gather(*(each.check(self._upstream) for each in self.health.values()), self._models.ask())
        work = [
            *(go_on("health", functools.partial(each.run, self._upstream)) for each in self.health.values()),
            *(go_on("events", feed.run) for feed in self.feeds.values()),
            go_on("metrics", functools.partial(follow_metrics, self.fleet, self._upstream)),
            go_on("models", self._models.run),
            go_on("shadows", self.shadows.run),
        ]
        tasks = [asyncio.create_task(each) for each in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

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
            self._access.check_host(exchange, is_admin=route in (Route.ADMIN, Route.METRICS))
            if route in (Route.WORK, Route.ONE, Route.ALL, Route.PREFETCH, Route.WARM):
                self._access.check_client(exchange, or_admin=route is Route.ALL)
            outcome = await _ANSWERS[route](self, exchange)
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
            self._metrics.requests[route.value, outcome] += 1

    # -- routes --------------------------------------------------------------------------------------------------------

    async def _work(self, exchange: Exchange) -> str:
        """By the best replica."""
        if self.is_draining:
            raise HttpError(503, "the router stops: send this to another one, or try again", retry_s=1)
        began_s, withdrawals = self._clock.monotonic(), self.shadows.withdrawals
        async with self._prompt(exchange) as body, exchange.watched(is_cancelled=True):
            tenant = self._access.tenant(exchange.headers)
            ask = await self._prompts.read(
                exchange.path, exchange.headers, body, tenant=tenant, request_id=exchange.request_id
            )
            return await self._proxy.forward(exchange, body, ask, began_s, withdrawals=withdrawals)

    async def _one(self, exchange: Exchange) -> str:
        """By any replica, or the one that has what the path names; of the lists of models, what all list together."""
        if exchange.method == "GET" and exchange.path == LIST:
            return await self._list(exchange)
        owner, tenant = self._access.owner_of_texts(exchange.headers).mark, self._access.tenant(exchange.headers)
        ask = Ask((), 0, 1.0, tenant=tenant, owner=owner, response=response_of(exchange.path))
        async with self._body(exchange) as body, exchange.watched(is_cancelled=True):
            return await self._proxy.forward(exchange, body, ask, self._clock.monotonic())

    async def _list(self, exchange: Exchange) -> str:
        headers = [each for each in forwarded(exchange) if each[0].lower() not in _OF_LIST]
        found = union(await self._models.ask(headers, exchange.target))
        if found is None:
            raise NoReplicaError
        await exchange.respond(found.status, found.body)
        return "ok" if found.rows is not None else "client_error" if found.status < 500 else "server_error"

    async def _all(self, exchange: Exchange) -> str:
        """By every replica; it goes on to its end also if the client hangs up."""
        async with self._body(exchange) as body:
            return await self._fan_out(exchange, body)

    async def _fan_out(self, exchange: Exchange, body: bytes) -> str:
        is_withdrawing = exchange.path.rstrip("/") in WITHDRAWING
        # Those that are up come first: the first is asked before the others.
        names = sorted(self._replicas, key=lambda name: name not in self.fleet.up)
        async with self.shadows.withdrawing() if is_withdrawing else contextlib.nullcontext():
            outcome = "complete" if await fan_out(self._upstream, self.health, names, exchange, body) else "incomplete"
        self._models.ask_again()  # it may have changed adapters
        self._metrics.fan_outs[outcome,] += 1
        return outcome

    async def _prefetch(self, exchange: Exchange) -> str:
        """By the replica that would get the announced request; by all, if only tags are announced."""
        began_s = self._clock.monotonic()
        async with self._prompt(exchange) as body, exchange.watched(is_cancelled=True):
            tenant = self._access.tenant(exchange.headers)
            ask = await self._prompts.read("", exchange.headers, body, tenant=tenant, request_id=exchange.request_id)
            if ask.keys or ask.session:
                return await self._proxy.forward(exchange, body, ask, began_s, is_work=False)
            return await self._fan_out(exchange, body)

    async def _warm(self, exchange: Exchange) -> str:
        raise HttpError(
            501,
            "the router does not run warm-ups: run `hotspan cache warm --server` with its address, which sends each "
            "text to the replica that is chosen for it, or ask one replica",
        )

    async def _health(self, exchange: Exchange) -> str:
        """Whether requests may be sent here."""
        state = "Draining" if self.is_draining else "Healthy" if self.fleet.up else "Unhealthy"
        await exchange.respond(200 if state == "Healthy" else 503, b'{"status":"%b"}' % state.encode())
        return "answered"

    async def _page(self, exchange: Exchange) -> str:
        """The metrics."""
        self._access.check_metrics(exchange)
        await exchange.respond(200, self._metrics.page(), CONTENT_TYPE)
        return "answered"

    async def _dashboard(self, exchange: Exchange) -> str:
        """A page without data, which reads the metrics and the replicas with the token that it asks for."""
        page = dashboard()
        await exchange.respond(200, page.content, HTML, page.headers)
        return "answered"

    async def _admin(self, exchange: Exchange) -> str:
        """What the router knows of its replicas; taking one out, and back."""
        self._access.check_admin(exchange)
        path, method = exchange.path.rstrip("/"), exchange.method
        if path == REPLICAS and method == "GET":
            await exchange.respond(200, orjson.dumps({"replicas": [self._shown(name) for name in self._replicas]}))
        elif path == CACHE and method == "GET":
            found = await self._caches.read(exchange.headers.get("authorization", ""))
            await exchange.respond(200, orjson.dumps(found))
        elif path == MODELS and method == "GET":
            await self._models.ask()
            await exchange.respond(200, orjson.dumps({"models": self._models.shown()}))
        elif path == CANARY and method == "GET":
            await exchange.respond(200, orjson.dumps({"groups": self.shadows.shown()}))
        elif path == RESET and method == "POST":
            group = await self._field(exchange, "group")
            if not self.shadows.reset(group):
                named = ", ".join(self.shadows.names) or "none"
                raise HttpError(404, f"no group {group[:200]!r} has shadow requests: there are {named}")
            await exchange.respond(200, orjson.dumps({"groups": self.shadows.shown()}))
        elif path in (DRAIN, RESUME) and method == "POST":
            name = await self._named(exchange)
            self.health[name].drain(is_drained=path == DRAIN)
            await exchange.respond(200, orjson.dumps(self._shown(name)))
        else:
            raise HttpError(404, f"there are {', '.join(OWN_ROUTES)}")
        return "answered"

    # -- inside --------------------------------------------------------------------------------------------------------

    def _prompt(self, exchange: Exchange) -> HeldBody:
        """The body of a request that is a prompt: as large as a replica takes it, where all tell."""
        told = [] if exchange.path in AUDIO else [each.text_bytes for each in self.health.values()]
        most = max((each for each in told if each is not None), default=None) if None not in told else None
        return self._bodies.body(exchange, self._access.owner(exchange.headers), most)

    def _body(self, exchange: Exchange) -> HeldBody:
        most = MAX_SMALL_BYTES if is_small(exchange.method, exchange.path) else None
        return self._bodies.body(exchange, self._access.owner(exchange.headers), most, ROUTE_NEEDS)

    def _health_changed(self, name: str, can_take: bool) -> None:
        if can_take and name not in self.fleet.up:
            self._models.ask_again()
        self.dispatcher.set_up(name, can_take)

    def _events_changed(self, name: str, is_exact: bool, reason: str) -> None:
        level = logging.INFO if is_exact else logging.WARNING
        logger.log(level, "kv_events_%s replica=%s reason=%s", "exact" if is_exact else "assumed", name, reason)
        self.fleet.set_exact(name, is_exact)

    def _shown(self, name: str) -> dict[str, Any]:
        health, replica = self.health[name], self.fleet.replicas[name]
        return {
            "replica": name,
            "group": self._replicas[name].group,
            "can_take": health.can_take,
            "health": health.health.value,
            "breaker": health.breaker.state.value,
            "is_drained": health.is_drained,
            "in_flight": replica.load.in_flight,
            "is_exact": replica.is_exact,
            "prompts_match": replica.matching.is_good,
            "prompt_match_share": round(replica.matching.share, 3),
            "tokens_per_s": round(replica.load.tokens_per_s, 1),
            "models": self._models.of(name),
        }

    async def _named(self, exchange: Exchange) -> str:
        """The replica that a body names."""
        name = await self._field(exchange, "replica")
        if name not in self._replicas:
            raise HttpError(404, f"there is no replica {name[:200]!r}: there are {', '.join(self._replicas)}")
        return name

    async def _field(self, exchange: Exchange, field: str) -> str:
        """A field of a body, as text. A page of another site can't send JSON unasked."""
        if exchange.headers.get("content-type", "").partition(";")[0].strip() != JSON:
            raise HttpError(415, f"send {JSON}")
        try:
            # Also while clients hold all that they may.
            async with self._bodies.body(exchange, _ADMIN, MAX_SMALL_BYTES, ROUTE_NEEDS) as body:
                return str(orjson.loads(body)[field])
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            hint = "URL" if field == "replica" else "NAME"
            raise HttpError(400, f'which {field}? Send {{"{field}": {hint}}}') from error


_ANSWERS: Mapping[Route, Callable[[Gateway, Exchange], Awaitable[str]]] = {
    Route.WORK: Gateway._work,
    Route.ONE: Gateway._one,
    Route.ALL: Gateway._all,
    Route.PREFETCH: Gateway._prefetch,
    Route.WARM: Gateway._warm,
    Route.HEALTH: Gateway._health,
    Route.METRICS: Gateway._page,
    Route.DASHBOARD: Gateway._dashboard,
    Route.ADMIN: Gateway._admin,
}
"""Who answers a route, with its outcome."""
