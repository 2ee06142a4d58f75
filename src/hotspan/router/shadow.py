"""Shadow requests: copies that a candidate answers too, to see whether it answers as the other replicas do.

    answered by a replica of no candidate -> drawn by --shadow -> queue -> the candidate, and the same replica again
                                                 full: dropped                 |
                                            rolled back <- drift above the limit <- the three answers compared

The same replica answers again because servers may differ from themselves at temperature 0 (batch-dependent sums): a
candidate drifts by what it differs more than that. Nobody waits for a copy: it is made of an answer that was sent.
"""

import asyncio
import logging
import math
import random
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import orjson
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from hotspan.http.errors import HttpError
from hotspan.http.exchange import REQUEST_ID, Exchange
from hotspan.http.head import SESSION_HEADER
from hotspan.http.sse import SSE, Events
from hotspan.http.upstream import BrokenError, UnreachedError, Upstream, UpstreamResponse
from hotspan.router.fleet import Fleet
from hotspan.router.health import ReplicaHealth
from hotspan.router.settings import RouterSettings

logger = logging.getLogger(__name__)

_PREFIX = "hotspan_router_"
_PATHS = frozenset(("/v1/chat/completions", "/v1/completions"))
_MAX_BYTES = 256 * 1024
"""Of a request, and of an answer, that is copied."""

_QUEUE = 64
_WITHIN_S = 300.0
_DROPPED_HEADERS = frozenset((REQUEST_ID, "accept-encoding", "traceparent", "tracestate"))

_DIRECTIVES = "kv_transfer_params"
_LEAVES_NOTHING = {"no_store": True, "renew": False}
"""Directives of a copy: what its client has invalidated since, or no longer wants kept, must not be stored again."""

_OUTCOMES = ("same", "different", "not_comparable", "dropped", "failed", "no_replica")

_ALPHA = 0.05
"""Probability that a candidate without a drift above the limit is ever rolled back."""

_BETS = tuple((at + 0.5) / 12 for at in range(12))


class Evidence:
    """What comparisons say of a drift, at any time, however often it is asked.

    The drift is the expected value of D: 1 if the candidate differs and the control does not, -1 the other way round,
    else 0. Against "the drift is at most m" a bettor starts with 1 and multiplies it by 1 + b (D - m) at each
    comparison, for a fixed share b of 1 / (1 + m); the mean over several b is the wealth. If the drift is at most m,
    the wealth ever reaches 1 / alpha with a probability of at most alpha (Ville's inequality).
    """

    def __init__(self) -> None:
        self.worse = self.equal = self.better = self.different = self.noise = 0

    def note(self, *, differs: bool, control_differs: bool) -> None:
        """One comparison: whether the candidate's answer, and the same replica's second one, differ from the first."""
        self.different += differs
        self.noise += control_differs
        self.worse += differs and not control_differs
        self.better += control_differs and not differs
        self.equal += differs == control_differs

    @property
    def compared(self) -> int:
        return self.worse + self.equal + self.better

    @property
    def drift(self) -> float:
        """The estimate; 0 without comparisons."""
        return (self.worse - self.better) / self.compared if self.compared else 0.0

    @property
    def low(self) -> float:
        """The lower limit of the drift: with a probability of 95 % it is never above the drift, at no time."""
        low, high = -1.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.is_above(middle) else (low, middle)
        return low

    def is_above(self, limit: float) -> bool:
        """Whether the drift is above a limit, as far as can be told so far."""
        gains = [
            self.worse * math.log1p(bet * (1 - limit) / (1 + limit))
            + self.equal * math.log1p(-bet * limit / (1 + limit))
            + self.better * math.log1p(-bet)
            for bet in (_BETS if limit > -1 else ())
        ]
        most = max(gains, default=math.inf)
        return not gains or most + math.log(sum(math.exp(gain - most) for gain in gains) / len(gains)) >= -math.log(
            _ALPHA
        )


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
        if self.size <= _MAX_BYTES:
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
    """Makes and compares shadow requests, and rolls candidates back. One event loop's."""

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

    # -- on the way of a request ---------------------------------------------------------------------------------------

    def begin(
        self, exchange: Exchange, body: bytes, headers: list[tuple[str, str]], replica: str, answer: UpstreamResponse
    ) -> list[Copy]:
        """The copies of a request that `replica` answers; none if it is not drawn, or can't be compared.

        Comparable are completions at temperature 0 with one answer, of at most 256 KiB.
        """
        drawn = self._drawn(replica) if self._groups else []
        if not drawn:
            return []
        kind = answer.header("content-type")
        copied = _comparable(exchange, body) if answer.status == 200 and not answer.header("content-encoding") else None
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

    async def forget(self) -> None:
        """Something is about to be invalidated: no copy of a request from before is sent from now on, nor goes on.

        Which copies it concerns is the replicas' to know, and a copy is nobody's request: all are dropped.
        """
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
        first = answer_of(b"".join(copy.parts), is_stream=copy.is_stream) if copy.size <= _MAX_BYTES else None
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

    async def _ask(self, replica: str, copy: Copy) -> "Said | None":
        """A replica's answer, as a whole; None if it gives none."""
        status, content = await self._upstream.fetch(
            replica,
            copy.target,
            method="POST",
            headers=copy.headers,
            body=copy.body,
            within_s=_WITHIN_S,
            max_bytes=4 * _MAX_BYTES,
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


# -- answers -----------------------------------------------------------------------------------------------------------

Said = Mapping[str, str]
"""What an answer says: text, reasoning and tool calls, and why it ended."""


def answer_of(content: bytes, *, is_stream: bool) -> Said | None:
    """What an answer of one choice says, streamed or whole; None if it is not whole, or no such answer."""
    try:
        parts = Events().of(content + b"\n") if is_stream else [orjson.loads(content)]
        said: defaultdict[str, str] = defaultdict(str)
        for part in parts:
            for choice in part.get("choices") or ():
                _add(choice, said)
    except (ValueError, TypeError, AttributeError):
        return None
    return dict(said) if said.get("end") else None


def _add(choice: Mapping[str, Any], said: defaultdict[str, str]) -> None:
    part = choice.get("message") or choice.get("delta") or choice
    found = {
        "text": part.get("content") or choice.get("text"),
        "reasoning": part.get("reasoning") or part.get("reasoning_content"),
        "end": choice.get("finish_reason"),
    }
    for at, call in enumerate(part.get("tool_calls") or ()):
        function, number = call.get("function") or {}, call.get("index", at)
        found |= {f"tool {number}": function.get("name"), f"arguments {number}": function.get("arguments")}
    for name, text in found.items():
        if text:
            said[name] += text


def _comparable(exchange: Exchange, body: bytes) -> bytes | None:
    """The body of a copy, whose answer comes as a whole; None for a request whose answers can't be compared."""
    if exchange.path not in _PATHS or len(body) > _MAX_BYTES or SESSION_HEADER in exchange.headers:
        return None
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(parsed, dict) or parsed.get("temperature") != 0 or isinstance(parsed["temperature"], bool):
        return None
    is_several = isinstance(parsed.get("prompt"), list) and any(not isinstance(each, int) for each in parsed["prompt"])
    if parsed.get("n") not in (None, 1) or parsed.get("best_of") not in (None, 1) or is_several:
        return None
    asked = parsed.get(_DIRECTIVES) or {}
    if not isinstance(asked, dict) or parsed.get("use_beam_search"):  # a replica refuses directives beside that
        return None
    parsed.pop("stream_options", None)
    try:
        return orjson.dumps(parsed | {"stream": False, _DIRECTIVES: asked | _LEAVES_NOTHING})
    except orjson.JSONEncodeError:  # it can be nested more deeply than it can be written
        return None
