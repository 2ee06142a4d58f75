"""What a workload is: rounds, each of which sends prompts on a schedule of its own.

A new workload is one file: a frozen options dataclass (its fields are its command-line flags and its keys in the
configuration file) that builds a `Workload`. `workloads.WORKLOADS` names it, and nothing else changes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from hotspan.bench.records import Loop, RequestRecord, RoundName


class Message(NamedTuple):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat request: a user's message, after what was said before it."""

    request_id: str
    content: str = field(repr=False)
    max_tokens: int
    history: tuple[Message, ...] = field(default=(), repr=False)

    @property
    def messages(self) -> tuple[Message, ...]:
        return (*self.history, Message("user", self.content))


class Send(Protocol):
    """Sends a prompt now and returns once it is answered. A failure is a record too: it never raises for the server.

    due_time: when the schedule wanted it sent, in seconds of the run's clock; None if it names no time.
    """

    async def __call__(self, prompt: Prompt, due_time: float | None = None) -> RequestRecord: ...


RunClock = Callable[[], float]
"""Seconds since the run began, monotonic: what the records are written in."""

CountTokens = Callable[[str], Awaitable[int | None]]
"""The server's own count of a text's tokens without special ones, or None if it has no tokenizer endpoint."""


class Round(Protocol):
    """A named stretch of a run that is measured by itself."""

    @property
    def name(self) -> RoundName: ...

    @property
    def expected(self) -> int:
        """How many requests are due; one whose time runs out may send fewer."""
        ...

    @property
    def loop(self) -> Loop: ...

    async def play(self, send: Send, clock: RunClock) -> None:
        """Send everything, at the times that the schedule says, and return once all of it is answered."""
        ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Prompts in order, at most `in_flight` at a time: the next one starts when one ends."""

    name: RoundName
    prompts: tuple[Prompt, ...] = field(repr=False)
    in_flight: int = 1

    @property
    def expected(self) -> int:
        return len(self.prompts)

    @property
    def loop(self) -> Loop:
        return Loop.CLOSED

    async def play(self, send: Send, clock: RunClock) -> None:
        """The semaphore is taken before the task starts, so that prompts are sent strictly in their order."""
        free = asyncio.Semaphore(self.in_flight)

        async def send_one(prompt: Prompt) -> None:
            try:
                await send(prompt)
            finally:
                free.release()

        async with asyncio.TaskGroup() as tasks:
            for prompt in self.prompts:
                await free.acquire()
                tasks.create_task(send_one(prompt))


class Workload(Protocol):
    """A stream of requests, the same for the same options and seed."""

    async def prepare(self, count_tokens: CountTokens) -> None:
        """Make the texts. Runs before anything is measured."""
        ...

    def rounds(self) -> Sequence[Round]:
        """The rounds in their order; the caller may leave some out, never the query round."""
        ...


@dataclass(frozen=True, slots=True)
class Scale:
    """How much KV the workload should touch: `kv_cache_volume` GiB at `tokens_per_gb` tokens each (None: unknown)."""

    kv_cache_volume: float
    tokens_per_gb: int | None


class WorkloadOptions(Protocol):
    """The options of one workload: a frozen dataclass made with `option()` fields.

    Its `__post_init__` raises ConfigError for values that can't work.
    """

    NAME: ClassVar[str]
    PREFIX: ClassVar[str]
    COUNT_FLAG: ClassVar[str]  # sets its size outright, for those who don't know tokens per GiB
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def needs_scale(self) -> bool:
        """Whether its size follows from the KV cache volume, so that tokens per GiB must be known."""
        ...

    def build(self, scale: Scale, seed: int) -> Workload: ...
