"""Routes that administer the cache: statistics, verification, invalidation, keys."""

import contextlib
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.responses import HTMLResponse, JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from hotspan.cache.reasons import REASONS
from hotspan.config.settings import CacheSettings
from hotspan.config.tenants import Tenants
from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import EngineError
from hotspan.core.terms import DEFAULT_TENANT, tenant_label
from hotspan.http.dashboard import DASHBOARD, HTML, dashboard
from hotspan.http.errors import REQUEST, HttpError
from hotspan.http.exchange import note_read
from hotspan.http.paths import EXPLAIN, LOOKUP, PIN, PREFETCH
from hotspan.server.adapters.registry import AdapterRegistry, EngineAdapter
from hotspan.server.administered import Administered
from hotspan.server.announce import Announcement, Pinning, command_of, owner_of, pin_of
from hotspan.server.exchange import OwnRoute
from hotspan.server.invalidation import Invalidation, Invalidations, Name, check_batch, check_scope
from hotspan.server.principal import Principal, current_principal
from hotspan.server.receipts import merged, unfinished
from hotspan.server.recording import Recording, with_servers
from hotspan.server.sizes import TextLimit
from hotspan.server.turns import Turns

LOG_S, _LOG_EVERY_S, _LOG_REST_S = 1.0, 10.0, 0.1
"""How long a health check waits for the engine to say how far it has read the log; how often it asks which log that is,
until it is known; how old an answer may be, since anybody may ask."""

DURABLE_S = 10.0
"""How long a request waits for its invalidation to be durable."""

_SHRED_S = 40.0
_TEXTS_AT_ONCE, _MAX_TEXTS = 4, 256
"""Invalidations by text and announcements that the engine carries out at a time, and all that may wait."""

Json = dict[str, Any]
Logged = Annotated[str | None, Header(alias="x-hotspan-logged", include_in_schema=False)]
"""The place of the same invalidation in the log of a shared L2, which another replica wrote (router/fan_out.py)."""

_LOGGED = re.compile(r"(?P<epoch>[0-9a-f]{2,64}):(?P<generation>[0-9]{1,19}):(?P<namespace>[0-9a-f]{64})")


class WhichTenant(BaseModel):
    """A tenant."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: Name


class Question(BaseModel):
    """Which request is explained."""

    model_config = ConfigDict(extra="forbid", strict=True)

    request: str | None = Field(
        None,
        min_length=1,
        max_length=512,
        description="The id of an answer, or the X-Request-Id of its request. Default: the last 20 requests.",
    )
    tenant: Name | None = Field(None, description="The tenant; for a client with an API key, its own.")


class CacheAdmin:
    """The handlers. cache: settings of the tiers; None if the server has only the engine's own prefix cache.

    holders: keep texts for later. Each lets go of what commands invalidate before these are carried out.
    """

    def __init__(
        self,
        engine: Administered,
        cache: CacheSettings | None,
        tenants: Tenants,
        adapters: AdapterRegistry | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._engine = engine
        self._adapters = adapters
        self._cache = cache
        self._has_keys = tenants.has_keys
        names = {DEFAULT_TENANT, *tenants.names}
        self._texts = Turns(_TEXTS_AT_ONCE, len(tenants.tenants) + 2, _MAX_TEXTS, for_urgent=1)
        self._text_limit = TextLimit(engine.max_tokens, engine.max_chars)
        self._log: Json | None = None
        self._log_asked_s = -_LOG_EVERY_S
        self.holders: list[Callable[[Sequence[Json]], Awaitable[None]]] = []
        self._names = {f"{tenant_label(name):016x}": name for name in names}

    async def stats(self) -> Json:
        """The contents of each tier, the tokens loaded by tenant, texts that saved the most, and what reasons mean."""
        self.need_cache()
        replicas = await self.ask({"do": "stats"}, DURABLE_S)
        counts = [(tier, "tenants") for replica in replicas for tier in replica["tiers"].values()]
        for told, name in [*counts, *((replica, "hit_tokens") for replica in replicas)]:
            told[name] = {self._names.get(label, label): count for label, count in told[name].items()}
        for text in (text for replica in replicas for text in replica["texts"]):
            text["tenant"] = self._names.get(text["tenant"], text["tenant"])
        reasons = {name: {"says": reason.says, "todo": reason.todo} for name, reason in REASONS.items()}
        return {"replicas": replicas, "reasons": reasons}

    async def log(self, *, is_asked: bool = False) -> Json | None:
        """Which log of a shared L2 the engine reads, `{"name": ..}`; None for none, and while it is not known.

        is_asked: also up to which `generation` it has forgotten what the log says, as of now.
        """
        now_s = self._clock.monotonic()
        if self._cache is None or self._cache.l2 is None:
            return None
        if is_asked and now_s - self._log_asked_s < _LOG_REST_S:
            return self._log
        if is_asked or (self._log is None and now_s - self._log_asked_s >= _LOG_EVERY_S):
            self._log_asked_s = now_s
            with contextlib.suppress(TimeoutError, HttpError):
                logs = [each["log"] for each in await self.ask({"do": "log"}, LOG_S)]
                self._log = min(logs, key=lambda log: int(log["generation"])) if all(logs) else None
                return self._log
        return None if self._log is None else {"name": self._log["name"]}

    async def check(self) -> Json:
        """Read and verify everything on disk; corrupt chunks are quarantined. Takes as long as reading all of it."""
        self.need_cache()
        return {"replicas": await self.ask({"do": "check"}, None)}

    async def clear(self, logged: Logged = None) -> JSONResponse:
        """Invalidate everything, of all tenants."""
        self.need_cache()
        return await self._forget({"do": "invalidate"} | _logged(logged), {"everything": True})

    async def invalidate(self, asked: Invalidations, logged: Logged = None) -> JSONResponse:
        """Invalidate what matches all given fields. An API key reaches only its own tenant."""
        self.need_cache()
        note_read()
        check_batch(asked)
        do = {"do": "invalidate"} | _logged(logged)
        commands, scopes = [], []
        async with contextlib.AsyncExitStack() as stack:
            if any(each.names_text for each in asked.each):
                await stack.enter_async_context(self._texts.turn(current_principal(), is_urgent=True))
                self._text_limit.check_chat([each.prompt for each in asked.each])
            for each in asked.each:
                command, scope = await self._named(each)
                commands.append(command)
                scopes.append(scope)
            self._check_length(scopes)
            if not asked.batch:
                return await self._forget(do | commands[0], scopes[0])
            return await self._forget(do | {"batch": commands}, {"batch": scopes})

    async def prefetch(self, asked: Announcement) -> Json:
        """Bring what disk and L2 have of an announced prompt, session or document into RAM, before its request."""
        return await self._announced(asked, {})

    async def lookup(self, asked: Announcement) -> Json:
        """How much of a prompt, or of what a session or tags name, each tier has. Nothing is loaded, or kept longer."""
        return await self._announced(asked, {"do": "lookup"})

    async def _announced(self, asked: Announcement, do: Json) -> Json:
        self.need_cache()
        owner = owner_of(current_principal(), asked.tenant)
        adapter = None
        if asked.model is not None and asked.model not in self._engine.names:
            adapter = self.adapter(asked.model, owner)
        self._text_limit.check_text(asked.prompt)
        if asked.messages is not None:
            self._text_limit.check_chat(asked.messages, asked.tools, asked.chat_template, asked.chat_template_kwargs)
        async with self._texts.turn(current_principal()):
            command = await command_of(asked, self._engine, owner)
            if adapter is not None:
                command |= {"adapter_name": adapter.name, "adapter_path": adapter.path}
            return {"replicas": await self.ask(command | do, DURABLE_S)}

    async def pin(self, asked: Pinning) -> Json:
        """Have what carries some tags evicted last, up to a quota within the tenant's floor, until an end."""
        self.need_cache()
        answers = await self.ask(pin_of(asked, owner_of(current_principal(), asked.tenant)), DURABLE_S)
        if refused := [answer["refused"] for answer in answers if "refused" in answer]:
            raise HttpError(409, refused[0])
        return {"replicas": answers}

    async def explain(self, asked: Question) -> Json:
        """Why the tokens of a request were computed, and how far it agreed with an earlier one."""
        self.need_cache()
        principal = current_principal()
        tenant = asked.tenant if principal.is_admin else owner_of(principal, asked.tenant)
        command = {"do": "explain", "request": asked.request, "tenant": tenant, "is_client": not principal.is_admin}
        async with self._texts.turn(principal):
            answers = await self.ask(command, DURABLE_S)
        if refused := [answer["refused"] for answer in answers if "refused" in answer]:
            raise HttpError(409, refused[0])
        return {"replicas": answers}

    async def shred(self, asked: WhichTenant) -> JSONResponse:
        """Invalidate all of a tenant and destroy its keys: no stored copy can be read again."""
        self._need_keys()
        return await self._forget({"do": "shred", "tenant": asked.tenant}, {"tenant": asked.tenant}, _SHRED_S)

    async def rotate(self, asked: WhichTenant) -> Json:
        """Give a tenant a new root key; stored chunks stay readable."""
        self._need_keys()
        answers = await self.ask({"do": "rotate", "tenant": asked.tenant}, _SHRED_S)
        return {"tenant": asked.tenant, "roots": [answer["root"] for answer in answers]}

    async def trace(self, asked: Recording) -> Json:
        """The requests since the last call, without their text. The first call begins a recording.

        A call that says so ends it, or silence.
        """
        blocks = asked.tokens_of_blocks(None if self._cache is None else self._cache.chunk_tokens)
        found = await self._engine.trace(asked.recording, blocks, is_last=asked.is_last)
        if found is None:
            raise HttpError(409, "another recording is in progress: try again when it has stopped")
        if "server" not in found:
            return found
        replicas: list[Json] = []
        if self._cache is not None:
            with contextlib.suppress(TimeoutError, HttpError):  # the requests are there all the same
                replicas = await self.ask({"do": "stats"}, DURABLE_S)
        return with_servers(found, replicas)

    async def page(self) -> Response:
        """A page for browsers that shows the metrics and the tiers, live; it asks for the admin token."""
        page = dashboard()
        return Response(page.content, headers=dict(page.headers), media_type=HTML)

    # -- inside ----------------------------------------------------------------------------------------------------

    def need_cache(self) -> None:
        """Raise HttpError 409 if the server has no tiers."""
        if self._cache is None:
            raise HttpError(
                409,
                "this server has no hotspan cache (--no-cache): restart it to empty the engine's own prefix cache, "
                "or serve without --no-cache",
            )

    def _need_keys(self) -> None:
        self.need_cache()
        if self._cache is None or self._cache.encryption is None:
            raise HttpError(409, "this server has no keys: serve with --kek and --key-store")

    def _reach(self, principal: Principal, asked: Invalidation) -> str | None:
        """The tenant that an invalidation is confined to; None for all."""
        if principal.is_admin:
            if asked.is_empty:
                raise HttpError(400, "this names nothing to forget: to forget everything POST /hotspan/cache/clear")
            return asked.tenant
        if not principal.has_key:
            raise HttpError(401, "forgetting needs an API key or the admin token: send `Authorization: Bearer ...`")
        if asked.tenant not in (None, principal.tenant):
            raise HttpError(403, f"this key belongs to another tenant than {asked.tenant!r}: leave tenant out")
        if asked.is_empty:
            raise HttpError(
                400,
                f'this names nothing to forget: {{"tenant": "{principal.tenant}"}} is all of yours; everything of '
                "everybody is the administrator's (POST /hotspan/cache/clear)",
            )
        return principal.tenant

    async def _named(self, asked: Invalidation) -> tuple[Json, Json]:
        """One invalidation: the engine's command, and the scope for the receipt."""
        tenant = self._reach(current_principal(), asked)
        check_scope(asked)
        command: Json = {"tenant": tenant, "session": asked.session, "tags": asked.tags}
        command |= {"adapter": asked.adapter, "model": asked.model}
        scope = {name: value for name, value in command.items() if value}
        if asked.names_text:
            text = await self._text(asked, tenant)
            command |= text
            scope |= {"tenant": text["tenant"], "tokens": len(text["tokens"]), "tokens_from": text["tokens_from"]}
        return command, scope

    def _check_length(self, scopes: Sequence[Json]) -> None:
        """Raise HttpError for a text longer than the model's context, which was never computed."""
        tokens, most = sum(scope.get("tokens", 0) for scope in scopes), self._engine.max_tokens
        if tokens > most:
            what = "the texts of a batch are" if len(scopes) > 1 else "the text is"
            raise HttpError(
                400, f"{what} {tokens} tokens long, and this model takes {most}: nothing longer is ever stored"
            )
        for scope in scopes:
            if "tokens" in scope and scope["tokens_from"] >= scope["tokens"]:
                raise HttpError(
                    400,
                    f"tokens_from is {scope['tokens_from']} and the text ends at {scope['tokens']}: it names nothing",
                )

    async def _text(self, asked: Invalidation, tenant: str | None) -> Json:
        """The fields by which the engine finds a text."""
        if tenant is None and self._has_keys:
            raise HttpError(400, "a text belongs to a tenant: say which")
        owner = DEFAULT_TENANT if tenant is None else tenant
        adapter = None if asked.adapter is None else self.adapter(asked.adapter, owner)
        tokens = asked.tokens
        if tokens is None:
            try:
                tokens = await self._engine.tokens(asked.prompt or "")
            except ValueError as error:  # longer than the model takes
                raise HttpError(400, str(error)) from error
        return {
            "tenant": owner,
            "tokens": tokens,
            "tokens_from": asked.tokens_from or 0,
            "cache_salt": self._engine.salt(owner, asked.cache_salt),
            "adapter_name": None if adapter is None else adapter.name,
            "adapter_path": None if adapter is None else adapter.path,
        }

    def adapter(self, name: str, owner: str) -> EngineAdapter:
        """What the names of an adapter's KV are made of."""
        found = None if self._adapters is None else self._adapters.engine_adapter(name, owner)
        if found is None and (path := self._engine.adapter_path(name)) is not None:
            found = EngineAdapter(name, path)  # one that the server was started with
        if found is None:
            raise HttpError(
                404,
                f"there is no adapter {name!r} now, and nothing else tells what its texts are called: leave the text "
                "out to forget all that was computed with it, or register it again",
            )
        return found

    async def _forget(self, command: Json, scope: Json, timeout_s: float = DURABLE_S) -> JSONResponse:
        """The receipt, with status 503 if the invalidation would not survive a restart."""
        try:
            receipt = merged(await self.withdraw(command, timeout_s)) | {"scope": scope}
        except TimeoutError:
            return unfinished(f"the engine gave no answer within {timeout_s:g} s: repeat it", {"scope": scope})
        if "refused" in receipt:
            raise HttpError(400, receipt["refused"])
        if receipt["is_durable"]:
            return JSONResponse(receipt)
        return unfinished("it holds in memory, but not after a restart: see to the disk, then repeat it", receipt)

    async def withdraw(self, command: Json, timeout_s: float = DURABLE_S) -> list[Json]:
        """The answer of each engine core to an invalidation; the holders have let go before. Raises: as `ask`."""
        for let_go in self.holders:
            await let_go(command.get("batch") or [command])
        return await self.ask(command, timeout_s)

    async def ask(self, command: Json, timeout_s: float | None) -> list[Json]:
        """The answer of each engine core. Raises: TimeoutError; HttpError 503 with what the engine said."""
        try:
            return await self._engine.administer(command, timeout_s)
        except EngineError as error:
            raise HttpError(503, str(error), about=REQUEST) from error


def admin_router(admin: CacheAdmin) -> APIRouter:
    """hotspan's own routes."""
    router = APIRouter(tags=["hotspan"], route_class=OwnRoute)
    router.get(DASHBOARD, response_class=HTMLResponse)(admin.page)
    router.get("/hotspan/cache")(admin.stats)
    router.post("/hotspan/cache/invalidate")(admin.invalidate)
    router.post(PREFETCH)(admin.prefetch)
    router.post(LOOKUP)(admin.lookup)
    router.post(PIN)(admin.pin)
    router.post(EXPLAIN)(admin.explain)
    router.post("/hotspan/cache/clear")(admin.clear)
    router.post("/hotspan/cache/check")(admin.check)
    router.post("/hotspan/trace")(admin.trace)
    router.post("/hotspan/keys/shred")(admin.shred)
    router.post("/hotspan/keys/rotate")(admin.rotate)
    return router


def _logged(header: str | None) -> Json:
    """The place of an entry that is in the log already, for the engine; empty for any other header."""
    found = _LOGGED.fullmatch(header or "")
    return {} if found is None else {"logged": found.groupdict()}
