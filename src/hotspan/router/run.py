"""The router's process: put together, bound, asked how its replicas are, served, drained."""

import contextlib
import logging
import random
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass

import uvicorn

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.http.serving import BACKLOG, DrainingServer, bind, uvicorn_config
from hotspan.http.upstream import Upstream
from hotspan.router.admin import Admin
from hotspan.router.dispatcher import Dispatcher
from hotspan.router.feeds import Feeds
from hotspan.router.figures import figures
from hotspan.router.fleet import Fleet
from hotspan.router.gateway import Gateway, Parts, http_limits
from hotspan.router.health import ReplicaHealth
from hotspan.router.health_checks import HealthChecks
from hotspan.router.index import PrefixIndex
from hotspan.router.measured import Measured
from hotspan.router.memory import settle_memory
from hotspan.router.metrics import Counts, Exposition
from hotspan.router.policy import Weights
from hotspan.router.proxy import Proxy
from hotspan.router.session import session_key
from hotspan.router.settings import RouterSettings
from hotspan.router.stateful import StatefulSessions
from hotspan.router.template import ChatTemplate
from hotspan.router.tenants import TenantNames
from hotspan.router.text import Prompts
from hotspan.router.tokens import TokenTable
from hotspan.router.tracing import Tracer, no_tracer, open_tracer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Router:
    """A router that runs."""

    gateway: Gateway
    fleet: Fleet
    dispatcher: Dispatcher
    checks: HealthChecks
    feeds: Feeds
    measured: Measured


@contextlib.asynccontextmanager
async def opened(
    settings: RouterSettings,
    *,
    clock: Clock | None = None,
    rng: random.Random | None = None,
    tracer: Tracer = no_tracer,
) -> AsyncIterator[Router]:
    """A router whose replicas have been asked once how they are. Raises: ConfigError, as `TokenTable.load`."""
    clock, rng = clock or SystemClock(), rng or random.Random()
    async with Upstream(
        connect_timeout_s=settings.connect_timeout_s, read_timeout_s=settings.read_timeout_s
    ) as upstream:
        router = _assembled(settings, upstream, clock, rng, tracer)
        try:
            await router.checks.begin()
            router.feeds.begin()
            router.measured.begin()
            yield router
        finally:
            await router.measured.end()
            await router.feeds.end()
            await router.checks.end()


def _assembled(
    settings: RouterSettings, upstream: Upstream, clock: Clock, rng: random.Random, tracer: Tracer
) -> Router:
    """All parts, put together."""
    replicas = {replica.url: replica for replica in settings.replicas}
    tenants = TenantNames(settings.tenant_header, settings.keys)
    prompts, table = _prompts(settings, tenants)
    fleet = Fleet(
        strategy=settings.strategy,
        index=PrefixIndex(settings.index_bytes),
        clock=clock,
        rng=rng,
        weights=Weights(threshold=settings.threshold),
    )
    slots = {name: fleet.add(name) for name in replicas}
    feeds = Feeds(settings.replicas, slots, fleet, prompts, table, rng, settings.events_keys)
    replica_health = {name: ReplicaHealth(settings.health, clock, rng) for name in replicas}
    counts, sessions = Counts(), StatefulSessions(clock)
    dispatcher = Dispatcher(
        fleet,
        replicas,
        max_in_flight=settings.max_in_flight,
        queue_size=settings.queue_size,
        queue_timeout_s=settings.queue_timeout_s,
        clock=clock,
        on_take=lambda name: checks.took(name),
    )
    checks = HealthChecks(replica_health, dispatcher, upstream, settings.health, rng=rng)
    proxy = Proxy(
        settings,
        prompts=prompts,
        upstream=upstream,
        dispatcher=dispatcher,
        checks=checks,
        sessions=sessions,
        counts=counts,
        tracer=tracer,
        clock=clock,
    )
    exposition = Exposition(counts, [*figures(fleet, replica_health, dispatcher, sessions, prompts), *feeds.figures()])
    admin = Admin(settings.admin_token, replicas, fleet, replica_health, dispatcher, checks)
    parts = Parts(settings, prompts, tenants, upstream, dispatcher, proxy, counts, exposition, admin, clock)
    return Router(Gateway(parts), fleet, dispatcher, checks, feeds, Measured(fleet, list(replicas), upstream))


def run_router(settings: RouterSettings) -> None:
    """Serve until a signal to stop, then let requests in flight end.

    Raises: ConfigError with what to do, before the port answers.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    with contextlib.closing(bind(settings.host, settings.port)) as listener:
        import uvloop

        uvloop.run(_serve(settings, listener))


async def _serve(settings: RouterSettings, listener: socket.socket) -> None:
    tracer: Tracer = no_tracer
    ends_tracer = _nothing
    if settings.otlp_endpoint:
        tracer, ends_tracer = open_tracer(settings.otlp_endpoint)
    try:
        async with opened(settings, tracer=tracer) as router:
            settle_memory()
            config = served(router.gateway, settings)
            server = DrainingServer(config, router.gateway, settings.drain_s, lambda: _ready_line(settings, listener))
            await server.serve(sockets=[listener])
    finally:
        ends_tracer()


def _ready_line(settings: RouterSettings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"hotspan routes to {len(settings.replicas)} replicas at http://{shown}:{port}"


def _nothing() -> None:
    pass


def served(app: Gateway, settings: RouterSettings) -> uvicorn.Config:
    """How uvicorn serves the router's app."""
    return uvicorn_config(
        app,
        http_limits(settings),
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
    )


def _prompts(settings: RouterSettings, tenants: TenantNames) -> tuple[Prompts, TokenTable | None]:
    """What reads prompts, and the bytes of the model's tokens."""
    table = template = None
    if settings.model is not None:
        template = ChatTemplate.load(settings.model)
        try:
            table = TokenTable.load(settings.model)
        except ConfigError as error:
            if any(replica.events for replica in settings.replicas):
                raise
            logger.warning("tokens_unreadable error=%s: prompts of token ids are not compared", error)
    # Events do not say which name is the model's own; without them each name can have its own texts.
    names = settings.model_names or (None if any(replica.events for replica in settings.replicas) else ())
    prompts = Prompts(
        names=names,
        template=template,
        table=table,
        session_of=session_key,
        session_key=settings.session_key or "",
        tenant_of=tenants.at_replicas,
    )
    return prompts, table
