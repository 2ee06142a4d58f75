"""Texts that the server computes by itself while it has no requests: POST /hotspan/cache/warm.

client -> Warming: a job of a tenant -> one text at a time -> Front, as that tenant's request, when no other is there

A request that arrives takes the engine at once: the text in work is withdrawn, and goes on later behind what has been
stored of it.
"""

import asyncio
import json
import logging
import secrets
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from typing import Any

import httpx
from fastapi import APIRouter
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.directives import RetentionRule, governed, parse_directives, with_documents
from hotspan.core.errors import ConfigError, RefusedError
from hotspan.http.bodies import Budget
from hotspan.http.errors import HttpError
from hotspan.http.paths import WARM, WARM_UP
from hotspan.http.warming import Room, Server, Warmed, Warmup, room_of, warm
from hotspan.server.admission import Admission
from hotspan.server.announce import owner_of
from hotspan.server.exchange import OwnRoute
from hotspan.server.principal import Principal, asking, current_principal
from hotspan.server.turns import Turns
from hotspan.server.warm_requests import WarmRequest

logger = logging.getLogger(__name__)

MAX_JOBS = 16
"""That are not over, of all tenants; a tenant has at most half of them."""

MAX_HELD_CHARS = 1 << 26
"""Of the texts of jobs that are not over, each with its template; half of them is divided between the tenants. What is
kept of a job that is over is bounded by itself (`Result`)."""

KEPT_JOBS, MAX_KEPT_JOBS, _KEPT_S = 32, 1024, 3600.0
"""Results of jobs that are over: of a tenant, of all tenants, and for how long."""

MAX_FAILED, _MAX_CHARS, _MAX_WHY = 100, 80, 200
"""Failures that a result names, others are counted; and characters of such a name and of a reason: at most 112 KiB of
a result."""

_NAME = "http://warming"
_INVALIDATED = "it was invalidated"

Json = dict[str, Any]


class State(StrEnum):
    """Of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(slots=True)
class Result(Warmed):
    """Of a job, in bounded memory: it is kept when the job is over. count: of failures."""

    count: int = 0

    def fail(self, name: str, why: str) -> None:
        self.count += 1
        if len(self.failed) < MAX_FAILED:
            self.failed.append(f"{_short(name, _MAX_CHARS)}: {_short(why, _MAX_WHY)}")


@dataclass(slots=True)
class Job:
    """Texts of one request.

    chars:  of each text that is left, in their order. ttl_s: of the one that expires first. reason: why it failed.
    current: the one in work; is_withdrawn: it was invalidated. asked: its request.
    """

    owner: str
    texts: deque[Warmup]
    common: Json
    chars: deque[int]
    ttl_s: int | None
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    state: State = State.WAITING
    done: Result = field(default_factory=Result)
    count: int = 0
    ended_s: float = 0.0
    reason: str = ""
    task: "asyncio.Task[None] | None" = None
    current: Warmup | None = None
    asked: "asyncio.Task[Any] | None" = None
    is_withdrawn: bool = False

    @property
    def is_over(self) -> bool:
        return self.state not in (State.WAITING, State.RUNNING)

    def told(self, room: Room) -> Json:
        """The answer that tells of it. `bytes`: of its KV in each tier."""
        done = self.done
        return {
            "id": self.id,
            "state": self.state.value,
            "texts": self.count,
            "warmed": done.texts,
            "failed": done.count,
            "failures": done.failed,
            "tokens": done.tokens,
            "cached_tokens": done.cached,
            "bytes": round(done.tokens * room.token_bytes),
            "largest_tier_bytes": round(room.capacity_bytes),
            "ttl_s": self.ttl_s,
        } | ({"reason": self.reason} if self.reason else {})


class Warming:
    """The jobs of a server: a tenant's one after the other, texts of several tenants in turn. One event loop's.

    has_keys:  tenants are told apart by API keys.
    retention: rules that shorten the time to live of a text, or forbid to store it.
    tenants:   how many there are.
    """

    def __init__(
        self,
        *,
        has_keys: bool,
        retention: tuple[RetentionRule, ...] = (),
        tenants: int = 1,
        clock: Clock | None = None,
    ) -> None:
        self._has_keys = has_keys
        self._retention = retention
        self._clock = clock or SystemClock()
        self._jobs: dict[str, Job] = {}
        self._held = Budget(MAX_HELD_CHARS, tenants)
        self._turns = Turns(1, tenants, MAX_JOBS)
        self._own_turns: dict[str, asyncio.Lock] = {}
        self._app: ASGIApp | None = None
        self._admission: Admission | None = None

    def attach(self, app: ASGIApp, admission: Admission) -> None:
        """Say who answers the requests of texts, and who knows of other requests."""
        self._app, self._admission = app, admission

    def begin(self, asked: WarmRequest, owner: str) -> Job:
        """A job that has begun or waits for others. Raises: HttpError 400 or 429."""
        self._drop_old()
        open_jobs = [job for job in self._jobs.values() if not job.is_over]
        if len(open_jobs) >= MAX_JOBS or sum(job.owner == owner for job in open_jobs) >= MAX_JOBS // 2:
            raise HttpError(429, "too many warm-ups are in progress: wait until one ends, or cancel one", retry_s=10)
        chars = deque(asked.chars())
        if (size := sum(chars)) > self._held.most:
            raise HttpError(413, f"the texts have {size:,} characters with the template: send less at a time")
        if not self._held.take(owner, size):
            raise HttpError(429, "your warm-ups in progress hold too much text: send this later", retry_s=10)
        try:
            return self._begun(asked, owner, chars)
        except BaseException:
            self._held.give(owner, size)
            raise

    def _begun(self, asked: WarmRequest, owner: str, chars: deque[int]) -> Job:
        common: Json = {"max_tokens": 1, "temperature": 0} | ({"model": asked.model} if asked.model else {})
        common |= {"kv_transfer_params": asked.directives} if asked.directives else {}
        texts = asked.warmups()
        job = Job(owner, deque(texts), common, chars, self._ttl_s(texts, asked.directives, owner), count=len(texts))
        self._jobs[job.id] = job
        with asking(Principal(owner, has_key=self._has_keys)):
            job.task = asyncio.create_task(self._run(job))
        return job

    def find(self, name: str, principal: Principal) -> Job:
        """A job of this principal's tenant; of any, for the administrator. Raises: HttpError 404."""
        job = self._jobs.get(name)
        if job is None or not (principal.is_admin or principal.tenant == job.owner):
            raise HttpError(404, f"there is no warm-up {name!r:.40}: results are kept for an hour")
        return job

    async def cancel(self, job: Job) -> None:
        """End a job; what has been computed stays cached."""
        if job.task is not None and not job.is_over:
            job.task.cancel()
            await asyncio.wait({job.task})

    async def forget(self, commands: Sequence[Json]) -> None:
        """Let go of the texts that invalidations take: none of them is sent from now on.

        A text that is named by its tokens is not known here: the engine keeps nothing of a text that was invalidated
        while it was held (cache/withdrawals.py).
        """
        for job in [job for job in self._jobs.values() if not job.is_over]:
            texts = list(zip(job.texts, job.chars, strict=True))
            waiting = [each for each in texts if each[0] is not job.current]
            taken = [each for each in waiting if any(_takes(command, job, each[0]) for command in commands)]
            gone = {id(text) for text, _ in taken}
            left = [each for each in texts if id(each[0]) not in gone]
            job.texts, job.chars = deque(text for text, _ in left), deque(chars for _, chars in left)
            self._held.give(job.owner, sum(chars for _, chars in taken))
            for text, _ in taken:
                job.done.fail(text.name, _INVALIDATED)
            if job.current is not None and any(_takes(each, job, job.current) for each in commands):
                job.is_withdrawn = True
                if job.asked is not None:
                    job.asked.cancel()
                    await asyncio.wait({job.asked})

    async def told(self, job: Job) -> Json:
        """The answer that tells of a job."""
        async with self._client() as client:
            return job.told(room_of((await client.get("/metrics")).text))

    async def close(self) -> None:
        """Cancel all jobs."""
        await asyncio.gather(*(self.cancel(job) for job in self._jobs.values()))

    # -- inside --------------------------------------------------------------------------------------------------------

    async def _run(self, job: Job) -> None:
        try:
            async with self._own_turns.setdefault(job.owner, asyncio.Lock()):
                job.state = State.RUNNING
                await warm(self._left(job), Server(partial(self._in_turn, job)), job.common, job.done)
            job.state = State.DONE
        except asyncio.CancelledError:
            job.state = State.CANCELLED
            raise
        except ConfigError as error:
            job.state, job.reason = State.FAILED, _short(str(error), _MAX_WHY)
        except Exception as error:  # the task's boundary: who asks for the job is told that it ended
            logger.exception("warming_failed")
            job.state, job.reason = State.FAILED, f"an error of the server's: {type(error).__name__}"
        finally:
            job.ended_s = self._clock.monotonic()
            self._held.give(job.owner, sum(job.chars))
            job.texts.clear()
            job.chars.clear()
            job.current = None
            if not any(each.owner == job.owner and not each.is_over for each in self._jobs.values()):
                self._own_turns.pop(job.owner, None)

    def _left(self, job: Job) -> Iterator[Warmup]:
        """The texts of a job; each is let go of when the next one is asked for."""
        while job.texts:
            job.current, job.is_withdrawn = job.texts[0], False
            yield job.current
            job.texts.popleft()
            self._held.give(job.owner, job.chars.popleft())
        job.current = None

    async def _in_turn(self, job: Job, path: str, body: Json) -> Any:
        async with self._turns.turn(job.owner):
            return await self._alone(job, path, body)

    def _ttl_s(self, texts: Sequence[Warmup], common: Json, owner: str) -> int | None:
        """Seconds until the first of some texts expires; None if none does. Raises: HttpError 400."""
        lives = []
        for text in texts:
            asked = replace(parse_directives(text.directives | common), tenant=owner)
            kept = governed(asked, self._retention)
            if kept.no_store:
                raise HttpError(400, f"text {text.name}: a retention rule forbids to store it")
            lives.append(kept.ttl_s)
        return min((ttl_s for ttl_s in lives if ttl_s is not None), default=None)

    async def _alone(self, job: Job, path: str, body: Json) -> Any:
        """The answer to a request that is sent when no other is there, and again after each that came between.

        Raises: RefusedError.
        """
        if self._admission is None:
            raise ConfigError("the server has not started")
        while True:
            await self._admission.idle()
            if self._admission.is_draining:
                raise ConfigError("the server stops")
            if job.is_withdrawn:
                raise RefusedError(_INVALIDATED, {"error": {"code": 400}})
            asked = job.asked = asyncio.create_task(self._ask(path, body))
            other = asyncio.create_task(self._admission.contended())
            try:
                await asyncio.wait({asked, other}, return_when=asyncio.FIRST_COMPLETED)
                if asked.done() and not job.is_withdrawn:
                    return asked.result()
            finally:
                for task in (asked, other):
                    task.cancel()
                await asyncio.gather(asked, other, return_exceptions=True)
                job.asked = None

    async def _ask(self, path: str, body: Json) -> Any:
        async with self._client() as client:
            answer = await client.post(path, json=body)
        try:
            said = answer.json()
        except json.JSONDecodeError:
            said = None
        if answer.status_code != 200 or said is None:
            error = said.get("error") if isinstance(said, dict) else None
            message = error.get("message") if isinstance(error, dict) else f"HTTP {answer.status_code}"
            raise RefusedError(str(message), said)
        return said

    def _client(self) -> httpx.AsyncClient:
        if self._app is None:
            raise HttpError(503, "the server has not started: try again", retry_s=1)
        return httpx.AsyncClient(transport=httpx.ASGITransport(self._app), base_url=_NAME, timeout=None)

    def _drop_old(self) -> None:
        """Forget results that are old, or too many of their tenant's; of all, those of who has most."""
        over: dict[str, deque[Job]] = {}
        before = self._clock.monotonic() - _KEPT_S
        for job in [job for job in self._jobs.values() if job.is_over]:
            own = over.setdefault(job.owner, deque())
            own.append(job)
            if job.ended_s < before:
                self._jobs.pop(own.pop().id)
            elif len(own) > KEPT_JOBS:
                self._jobs.pop(own.popleft().id)
        for _ in range(sum(map(len, over.values())) - MAX_KEPT_JOBS):
            self._jobs.pop(max(over.values(), key=len).popleft().id)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."


def _takes(command: Json, job: Job, text: Warmup) -> bool:
    """Whether an invalidation takes all that a text's request would store."""
    if command.get("tokens") is not None or command.get("tenant") not in (None, job.owner):
        return False
    if command.get("adapter") not in (None, job.common.get("model")):
        return False
    if command.get("session") not in (None, text.directives.get("session")):
        return False
    return set(command.get("tags") or ()) <= with_documents(text.directives.get("tags", ()))


def warming_router(warming: Warming) -> APIRouter:
    """The routes of warm-ups."""
    router = APIRouter(tags=["hotspan"], route_class=OwnRoute)

    async def warm(asked: WarmRequest) -> JSONResponse:
        """Compute texts while the server has no requests, so that their first question is a hit. Answers at once."""
        job = warming.begin(asked, owner_of(current_principal(), asked.tenant))
        return JSONResponse(await warming.told(job), 202)

    async def warm_up(warm_up_id: str) -> Json:
        """How far a warm-up is."""
        return await warming.told(warming.find(warm_up_id, current_principal()))

    async def cancel_warm_up(warm_up_id: str) -> Json:
        """End a warm-up; what has been computed stays cached."""
        job = warming.find(warm_up_id, current_principal())
        await warming.cancel(job)
        return await warming.told(job)

    router.post(WARM, status_code=202)(warm)
    router.get(WARM_UP)(warm_up)
    router.delete(WARM_UP)(cancel_warm_up)
    return router
