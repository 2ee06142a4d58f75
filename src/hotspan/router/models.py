"""Which models and adapters each replica serves: replicas need not be alike.

    /v1/models of each replica  <- every few seconds; at once when it is up again, after adapters were changed through
                                   the router, and for a name that no replica is known to serve
    a client's GET /v1/models   -> asked of all with the client's headers; what they list together

A replica that does not list its models to the router (it asks for a key) may serve any. If it answers that it has no
model of that name, the request goes to another one, and others avoid it for a while.
"""

import asyncio
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import orjson

from hotspan.core.clock import Clock
from hotspan.http.paths import BY_NAME
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream
from hotspan.router.queue import Where

logger = logging.getLogger(__name__)

LIST = "/v1/models"
EVERY_S = 10.0
_TIMEOUT_S = 2.0
_AT_MOST_EVERY_S = 1.0
"""How often they are asked for the sake of names that nobody serves, which clients make up."""

MAX_NAMES = 4096
"""Of one replica. The names of further ones are not known, so that it may serve any."""

_BY_NAME = re.compile("|".join(re.sub(r"\{\w+\}", "([^/]+)", path) for path in (*BY_NAME, LIST + "/{model}")))
_MISSING = re.compile(rb'"param"\s*:\s*"model"')

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Listed:
    """What a replica answered: its status, its body, and the rows of models in it; None if it lists none."""

    replica: str
    status: int
    body: bytes = b""
    rows: Sequence[Mapping[str, Any]] | None = None


def named_by(target: str) -> str:
    """The model that a path names; "" if none."""
    found = _BY_NAME.fullmatch(target.partition("?")[0])
    return next(filter(None, found.groups()), "") if found else ""


def is_missing(status: int, body: bytes) -> bool:
    """Whether an answer says that there is no such model."""
    return status == HTTPStatus.NOT_FOUND and _MISSING.search(body) is not None


class ServedModels:
    """Of the replicas of one router. One event loop's."""

    def __init__(self, replicas: Iterable[str], upstream: Upstream, clock: Clock) -> None:
        self._served: dict[str, frozenset[str] | None] = dict.fromkeys(replicas)
        self._upstream = upstream
        self._clock = clock
        self._asked_s = float("-inf")
        self._is_wanted = asyncio.Event()

    def of(self, replica: str) -> list[str] | None:
        """The names that a replica serves, in order; None if it does not tell."""
        served = self._served[replica]
        return None if served is None else sorted(served)

    def shown(self) -> dict[str, list[str]]:
        """The replicas that serve each name."""
        found: dict[str, list[str]] = {}
        for replica, served in self._served.items():
            for name in served or ():
                found.setdefault(name, []).append(replica)
        return dict(sorted(found.items()))

    def serving(self, names: Iterable[str]) -> Where | None:
        """The replicas that may serve all these names; None if that leaves out nobody.

        A name that none is known to serve leaves out nobody: any replica can say that there is no such model.
        """
        where = frozenset(self._served)
        for name in filter(None, names):
            if any(name in served for served in self._served.values() if served is not None):
                where &= {replica for replica, served in self._served.items() if served is None or name in served}
            elif self._clock.monotonic() - self._asked_s >= _AT_MOST_EVERY_S:
                self._is_wanted.set()
        return where if where and len(where) < len(self._served) else None

    def ask_again(self) -> None:
        """They may have changed."""
        self._is_wanted.set()

    async def ask(self, headers: Headers = (), target: str = LIST) -> list[Listed]:
        """Ask all replicas now. headers, target: a client's; without them what replicas list is taken over."""
        if headers:
            return list(await asyncio.gather(*(self._ask(name, headers, target) for name in self._served)))
        self._is_wanted.clear()
        self._asked_s = self._clock.monotonic()
        found = await asyncio.gather(*(self._ask(name) for name in self._served))
        for listed in found:
            if listed.status:  # one that is down serves the same once it is back
                self._take(listed)
        return list(found)

    async def run(self) -> None:
        """Ask every few seconds, and whenever they may have changed, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._is_wanted.wait()
            except TimeoutError:
                pass
            await self.ask()

    def _take(self, listed: Listed) -> None:
        names = None if listed.rows is None else frozenset(row["id"] for row in listed.rows)
        known = names if names is None or len(names) <= MAX_NAMES else None
        if known != self._served[listed.replica]:
            logger.info(
                "models_changed replica=%s names=%s", listed.replica, "unknown" if known is None else len(known)
            )
        self._served[listed.replica] = known

    async def _ask(self, replica: str, headers: Headers = (), target: str = LIST) -> Listed:
        try:
            status, body = await self._upstream.fetch(replica, target, headers=headers, within_s=_TIMEOUT_S)
        except (UnreachedError, BrokenError):
            return Listed(replica, 0)
        return Listed(replica, status, body, _rows(body) if status == HTTPStatus.OK else None)


def _rows(body: bytes) -> Sequence[Mapping[str, Any]] | None:
    """The rows of a list of models; None if it is none."""
    try:
        rows = orjson.loads(body)["data"]
        return rows if all(isinstance(row["id"], str) for row in rows) else None
    except (orjson.JSONDecodeError, TypeError, KeyError):
        return None


def union(answers: Sequence[Listed]) -> Listed | None:
    """One list of what all replicas list, each name once; the answer of one that lists none if none does.

    None without any answer.
    """
    rows: dict[str, Mapping[str, Any]] = {}
    lists = [each.rows for each in answers if each.rows is not None]
    for row in (row for each in lists for row in each):
        rows.setdefault(row["id"], row)
    if lists:
        body = orjson.dumps({"object": "list", "data": list(rows.values())})
        return Listed("", HTTPStatus.OK, body, list(rows.values()))
    return next((each for each in answers if each.status), None)
