"""Shadow requests: copies that a candidate answers too, to see whether it answers as the other replicas do.

    answered by a replica of no candidate -> drawn by --shadow -> queue -> the candidate, and the same replica again
                                                 full: dropped                 |
                                            rolled back <- drift above the limit <- the three answers compared

The same replica answers again because servers may differ from themselves at temperature 0 (batch-dependent sums): a
candidate drifts by what it differs more than that. Nobody waits for a copy: it is made of an answer that was sent.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotspan.http.errors import HttpError
from hotspan.http.exchange import REQUEST_ID, Exchange
from hotspan.http.sse import SSE
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream, UpstreamResponse
from hotspan.router.answers import MAX_BYTES, Said, answer_of, comparable
from hotspan.router.evidence import Evidence
from hotspan.router.fleet import Fleet
from hotspan.router.health import ReplicaHealth
from hotspan.router.settings import RouterSettings

logger = logging.getLogger(__name__)

_PREFIX = "hotspan_router_"
_QUEUE = 64
_WITHIN_S = 300.0
_DROPPED_HEADERS = frozenset((REQUEST_ID, "accept-encoding", "traceparent", "tracestate"))

_OUTCOMES = ("same", "different", "not_comparable", "dropped", "failed", "no_replica")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Copy:
    """A request that is shadowed, and its answer as it goes to the client. replica: that answers it.

    is_withdrawn: something was invalidated since; it is not sent.
    """

    group: str
    replica: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes
    is_stream: bool
    parts: list[bytes] = field(default_factory=list)
    size: int = 0
    is_withdrawn: bool = False

    def add(self, part: bytes) -> None:
        """A part of the answer was sent."""
        self.size += len(part)
        if self.size <= MAX_BYTES:
            self.parts.append(part)


@dataclass(slots=True)
class _Group:
    """One candidate. drained: replicas that the rollback took out. outcomes: of its copies, counted."""

    name: str
    share: float
    replicas: frozenset[str]
    evidence: Evidence = field(default_factory=Evidence)
    is_rolled_back: bool = False
    drained: set[str] = field(default_factory=set)
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_OUTCOMES, 0))


class Shadows(Collector):
    """Makes and compares shadow requests, and rolls candidates back. One event loop's.

    withdrawals: beginnings and ends of invalidations. Who begins a request notes it.
    """

    def __init__(
        self,
        settings: RouterSettings,
        upstream: Upstream,
        fleet: Fleet,
        health: Mapping[str, ReplicaHealth],
        rng: random.Random,
    ) -> None:
        self._max_drift = settings.max_drift
        self._in_flight = settings.shadow_in_flight
        self._upstream, self._fleet, self._health, self._rng = upstream, fleet, health, rng
        self._groups = {
            name: _Group(name, share, frozenset(each.url for each in settings.replicas if each.group == name))
            for name, share in settings.shadow.items()
        }
        self._candidates = frozenset[str]().union(*(group.replicas for group in self._groups.values()))
        self._queue: asyncio.Queue[Copy] = asyncio.Queue(_QUEUE)
        self._held: WeakSet[Copy] = WeakSet()  # of requests that are being answered, or in the queue
        self._comparing: set[asyncio.Task[str]] = set()
        self.withdrawals = 0
        self._withdrawing = 0  # invalidations that are not acknowledged yet

    # -- on the way of a request ---------------------------------------------------------------------------------------

    def begin(
        self,
        exchange: Exchange,
        body: bytes,
        headers: list[tuple[str, str]],
        replica: str,
        answer: UpstreamResponse,
        since: int,
    ) -> list[Copy]:
        """The copies of a request that `replica` answers; none if it is not drawn, or can't be compared.

        Comparable are completions at temperature 0 with one answer, of at most 256 KiB. since: `withdrawals` when the
        request began, -1 for one without a prompt; what began before the end of an invalidation is not copied.
        """
        drawn = self._drawn(replica) if self._groups else []
        if drawn and since >= 0 and (since != self.withdrawals or self._withdrawing):
            for group in drawn:
                group.outcomes["dropped"] += 1
            return []
        if not drawn:
            return []
        kind = answer.header("content-type")
        is_plain = since >= 0 and answer.status == 200 and not answer.header("content-encoding")
        copied = comparable(exchange, body) if is_plain else None
        if copied is None:
            for group in drawn:
                group.outcomes["not_comparable"] += 1
            return []
        sent = [(name, value) for name, value in headers if name.lower() not in _DROPPED_HEADERS]
        sent.append((REQUEST_ID, f"{exchange.request_id[:100]}-shadow"))
        is_stream = kind.startswith(SSE)
        copies = [Copy(group.name, replica, exchange.target, sent, copied, is_stream) for group in drawn]
        self._held.update(copies)
        return copies

    def end(self, copies: list[Copy]) -> None:
        """The client has its whole answer. Never waits: a copy that finds the queue full is dropped."""
        for copy in copies:
            try:
                self._queue.put_nowait(copy)
            except asyncio.QueueFull:
                self._held.discard(copy)
                self._groups[copy.group].outcomes["dropped"] += 1

    @contextlib.asynccontextmanager
    async def withdrawing(self) -> AsyncIterator[None]:
        """In the block something is invalidated: of requests that began before its end no copy is sent, nor goes on.

        Which copies it concerns is the replicas' to know, and a copy is nobody's request: all are dropped.
        """
        self._withdrawing += 1
        try:
            await self._forget()
            yield
        finally:
            self._withdrawing -= 1
            self.withdrawals += 1  # what began in the block: its answer may come after it

    async def _forget(self) -> None:
        self.withdrawals += 1
        for copy in list(self._held):
            copy.is_withdrawn, copy.body, copy.parts = True, b"", []
        comparing = set(self._comparing)
        for task in comparing:
            task.cancel()
        if comparing:
            await asyncio.wait(comparing)

    def _drawn(self, replica: str) -> list[_Group]:
        """The groups that get a copy, each by its own share; none of what a candidate answered, who may be wrong."""
        if replica in self._candidates:
            return []
        return [g for g in self._groups.values() if not g.is_rolled_back and self._rng.random() < g.share]

    # -- beside it -----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Compare what is in the queue, until cancelled; without a group to shadow there is nothing to do."""
        if not self._groups:
            return
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._in_flight):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        while True:
            copy = await self._queue.get()
            group = self._groups[copy.group]
            self._held.discard(copy)
            try:
                outcome = "dropped" if group.is_rolled_back or copy.is_withdrawn else await self._compared(group, copy)
            except (UnreachedError, BrokenError, HttpError):
                outcome = "failed"
            except Exception:  # a copy is nobody's request: the next one is compared
                logger.exception("shadow_failed group=%s", group.name)
                outcome = "failed"
            group.outcomes[outcome] += 1

    async def _compared(self, group: _Group, copy: Copy) -> str:
        """As `_compare`, which `forget` may end."""
        task = asyncio.create_task(self._compare(group, copy))
        self._comparing.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._comparing.discard(task)
            task.cancel()
        return "dropped" if task.cancelled() else task.result()

    async def _compare(self, group: _Group, copy: Copy) -> str:
        """Ask the candidate, and the same replica again; the outcome, for the metrics."""
        first = answer_of(b"".join(copy.parts), is_stream=copy.is_stream) if copy.size <= MAX_BYTES else None
        if first is None:
            return "not_comparable"
        up = group.replicas & self._fleet.up
        if not up:
            return "no_replica"
        candidate = min(up, key=lambda name: (self._fleet.replicas[name].load.in_flight, self._rng.random()))
        asked = (self._ask(candidate, copy), self._ask(copy.replica, copy))
        theirs, control = await asyncio.gather(*asked, return_exceptions=True)
        for each in (theirs, control):
            if isinstance(each, BaseException):
                raise each
        if theirs is None or control is None:
            return "failed"
        if group.is_rolled_back:
            return "dropped"
        group.evidence.note(differs=theirs != first, control_differs=control != first)
        if group.evidence.is_above(self._max_drift):
            self._roll_back(group)
        return "different" if theirs != first else "same"

    async def _ask(self, replica: str, copy: Copy) -> Said | None:
        """A replica's answer, as a whole; None if it gives none."""
        status, content = await self._upstream.fetch(
            replica,
            copy.target,
            method="POST",
            headers=copy.headers,
            body=copy.body,
            within_s=_WITHIN_S,
            max_bytes=4 * MAX_BYTES,
        )
        return answer_of(content, is_stream=False) if status == 200 else None

    # -- rollback ------------------------------------------------------------------------------------------------------

    def _roll_back(self, group: _Group) -> None:
        """The candidate gets no more requests until `reset`."""
        group.is_rolled_back = True
        evidence = group.evidence
        logger.error(
            "canary_rolled_back group=%s compared=%d different=%d noise=%d drift=%.4f low=%.4f max_drift=%.4f",
            *(group.name, evidence.compared, evidence.different, evidence.noise),
            *(evidence.drift, evidence.low, self._max_drift),
        )
        for name in sorted(group.replicas):
            if not self._health[name].is_drained:
                group.drained.add(name)
                self._health[name].drain(is_drained=True, by="rollback")

    def reset(self, name: str) -> bool:
        """Forget what was compared, and give the candidate requests again. False if there is no such group."""
        group = self._groups.get(name)
        if group is None:
            return False
        for replica in sorted(group.drained):
            self._health[replica].drain(is_drained=False, by="reset")
        group.evidence, group.is_rolled_back = Evidence(), False
        group.drained.clear()
        return True

    @property
    def names(self) -> tuple[str, ...]:
        """The groups that are shadowed."""
        return tuple(self._groups)

    def shown(self) -> list[dict[str, Any]]:
        """The state of each candidate, for the administrator."""
        return [
            {
                "group": group.name,
                "shadow": group.share,
                "max_drift": self._max_drift,
                "compared": group.evidence.compared,
                "different": group.evidence.different,
                "noise": group.evidence.noise,
                "drift": round(group.evidence.drift, 6),
                "drift_low": round(group.evidence.low, 6),
                "is_rolled_back": group.is_rolled_back,
            }
            for group in self._groups.values()
        ]

    def collect(self) -> Iterator[Metric]:
        """The metrics, for a scrape."""
        labels = ("group",)
        copies = CounterMetricFamily(f"{_PREFIX}shadows", "Shadow requests, by outcome.", labels=("group", "outcome"))
        meaning = "Share of answers in which a candidate differs, above the noise floor."
        drift = GaugeMetricFamily(f"{_PREFIX}shadow_drift", meaning, labels=labels)
        low = GaugeMetricFamily(f"{_PREFIX}shadow_drift_low", "Lower limit of the shadow drift.", labels=labels)
        rolled_back = GaugeMetricFamily(f"{_PREFIX}rolled_back", "1 if a candidate was rolled back.", labels=labels)
        for group in self._groups.values():
            for outcome, count in group.outcomes.items():
                copies.add_metric((group.name, outcome), count)
            drift.add_metric((group.name,), group.evidence.drift)
            low.add_metric((group.name,), group.evidence.low)
            rolled_back.add_metric((group.name,), float(group.is_rolled_back))
        yield from (copies, drift, low, rolled_back)
