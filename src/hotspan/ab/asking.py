"""Sends the questions of a schedule to their sides and keeps what they answer."""

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hotspan.ab.items import Item
from hotspan.ab.schedule import Phase, Visit
from hotspan.bench.client import OpenAIClient, StreamedAnswer
from hotspan.bench.records import RequestRecord
from hotspan.core.errors import ConfigError

REPLICA_HEADER = "x-hotspan-replica"
"""What `hotspan route --expose` names the replica of an answer in."""


@dataclass(frozen=True, slots=True)
class Position:
    """One token of an answer: itself, and the log probabilities of the likeliest tokens in its place."""

    token: str
    top: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a side answered.

    tokens: empty where the server gives no log probabilities. replica: as a router names it.
    """

    record: RequestRecord
    tokens: tuple[Position, ...] = ()
    replica: str = ""

    @property
    def is_whole(self) -> bool:
        return self.record.successful

    @property
    def units(self) -> Sequence[str]:
        """What answers are compared in: tokens, or characters where tokens are not known."""
        return [each.token for each in self.tokens] or self.record.answer

    def is_same(self, other: "Answer") -> bool:
        """Whether both have the same text, the same tokens and the same end."""
        ours, theirs = self.record, other.record
        has_tokens = bool(self.tokens and other.tokens)
        return (
            ours.answer == theirs.answer
            and ours.finish_reason == theirs.finish_reason
            and (not has_tokens or list(self.units) == list(other.units))
        )


class _TokenAnswer(StreamedAnswer):
    """A streamed answer with its tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[Position] = []

    def take(self, event: dict[str, Any], now: float) -> None:
        super().take(event, now)
        for choice in event.get("choices") or ():
            for each in (choice.get("logprobs") or {}).get("content") or ():
                top = {str(one.get("token")): float(one.get("logprob")) for one in each.get("top_logprobs") or ()}
                self.tokens.append(Position(str(each.get("token")), top))


@dataclass(frozen=True, slots=True)
class Asking:
    """How questions are asked.

    top_logprobs: per token; 0 asks for none. is_fresh: each request gets a `cache_salt` of its own, so that no prefix
                  cache has its prompt.
    """

    max_tokens: int
    temperature: float
    seed: int
    top_logprobs: int
    is_fresh: bool = False

    def body(self, item: Item, model: str) -> dict[str, Any]:
        """The request for an item; the same for both sides but for the model's name."""
        body: dict[str, Any] = {
            "model": model,
            "messages": list(item.messages),
            "max_tokens": item.max_tokens or self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.top_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.is_fresh:
            body["cache_salt"] = f"hotspan-ab-{secrets.token_hex(16)}"
        return body


@dataclass(slots=True)
class Side:
    """A server, or one group of replicas behind a router.

    sessions: headers of which each request gets one, in turn. has_replica: whether an answer came from this side, by
              the replica's name; None does not look.
    """

    title: str
    client: OpenAIClient
    model: str
    asking: Asking
    sessions: Sequence[Mapping[str, str]] = ({},)
    has_replica: Callable[[str], bool] | None = None
    asked: int = 0

    async def ask(self, item: Item) -> Answer:
        """One answer. A failure is an answer that is not whole, with its reason in the record."""
        headers, order = self.sessions[self.asked % len(self.sessions)], self.asked
        self.asked += 1
        came = _TokenAnswer()
        record = await self.client.stream(self.asking.body(item, self.model), came, item.name, order, headers)
        replica = came.headers.get(REPLICA_HEADER, "")
        if record.successful and self.has_replica is not None and not self.has_replica(replica):
            error = f"replica {replica or '?'} answered, which is not of this side: is it down, or the share changed?"
            record = came.failure(item.name, order, error, record.finish_time)
        return Answer(record, tuple(came.tokens), replica)


async def model_of(client: OpenAIClient, title: str) -> str:
    """The first model that a server lists. Raises: ConfigError if there is none, or it can't be reached."""
    cards = await client.models()
    if not cards:
        raise ConfigError(f"side {title} lists no model: pass --model NAME")
    return cards[0].name


class Watcher(Protocol):
    """Is told how a run goes on."""

    def begins(self, what: str, requests: int) -> None: ...

    def answered(self) -> None: ...

    def ends(self) -> None:
        """No request is sent for a while: a server may be started."""
        ...

    def says(self, line: str) -> None: ...


Answers = dict[Visit, Answer]


async def play(
    phase: Phase,
    items: Sequence[Item],
    ask: Callable[[Visit, Item], Awaitable[Answer]],
    concurrency: int,
    on_answer: Callable[[Answer], None],
) -> Answers:
    """The answers of a phase, asked in its order with at most `concurrency` requests in flight over all sides."""
    free = asyncio.Semaphore(concurrency)
    found: Answers = {}

    async def one(visit: Visit) -> None:
        try:
            found[visit] = answer = await ask(visit, items[visit.item])
            on_answer(answer)
        finally:
            free.release()

    async with asyncio.TaskGroup() as tasks:
        for visit in phase.visits:
            await free.acquire()
            tasks.create_task(one(visit))
    return found
