"""What a workload is: options that make rounds, each of which sends prompts on a schedule of its own.

A new workload is one file: a subclass of `WorkloadOptions`, whose fields are its command-line flags and its keys in
the configuration file. `workloads.WORKLOADS` names it, and nothing else changes.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, Protocol

from hotspan.bench import scores
from hotspan.bench.records import Loop, RequestRecord, RoundName
from hotspan.config.options import check
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.bench.tokenizer import ModelTokenizer

_FIRST: Final = 8
_AHEAD: Final = 64
_PAUSE_S: Final = 0.001
_FEW_S: Final = 0.1
"""Before a prompt of a session is due, it is made: all of a long trace at once do not fit memory."""
_SPARE_S: Final = 0.005
"""A prompt is made if nothing is due for this long, and for as long as the slowest one took."""


class Message(NamedTuple):
    """One message of a chat."""

    role: Literal["system", "user", "assistant"]
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One chat request: a user's message, after what was said before it.

    answers:   known ones, of which one is right.
    sample_id: of a question in a dataset whose answer is to be in `<final_answer>` tags.
    """

    request_id: str
    content: str = field(repr=False)
    max_tokens: int
    history: tuple[Message, ...] = field(default=(), repr=False)
    answers: tuple[str, ...] = ()
    sample_id: str = ""

    def is_right(self, answer: str) -> bool | None:
        """Whether an answer has one of the known ones in it; None if none is known."""
        return scores.is_right(answer, self.answers) if self.answers else None

    def f1(self, answer: str) -> float | None:
        """How far an answer's words are those of a known one, 0 to 1; None if none is known."""
        return scores.token_f1(answer, self.answers) if self.answers else None

    def scored(self, record: RequestRecord) -> RequestRecord:
        """The record of an answer to it, with what the answer scores."""
        is_right, f1 = self.is_right(record.answer), self.f1(record.answer)
        return replace(record, is_right=is_right, f1=f1, sample_id=self.sample_id)

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


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Prompts at their due times, in seconds from the round's start, whatever the answers before them take.

    A late request keeps its due time, so that the wait is in `ttft_from_due` (no coordinated omission).
    """

    name: RoundName
    prompts: Sequence[Prompt] = field(repr=False)
    due_s: Sequence[float] = field(repr=False)

    @property
    def expected(self) -> int:
        return len(self.prompts)

    @property
    def loop(self) -> Loop:
        return Loop.OPEN

    async def play(self, send: Send, clock: RunClock) -> None:
        """Prompts are made while nothing is due, a few ahead: a long trace does not fit memory at once."""
        made, spare_s = iter(self.prompts), _SPARE_S
        ahead = deque(islice(made, _FIRST))
        started = clock()
        async with asyncio.TaskGroup() as tasks:
            for due_s in self.due_s:
                due = started + due_s
                while not ahead or (len(ahead) < _AHEAD and due - clock() > spare_s):
                    await asyncio.sleep(_PAUSE_S if ahead else 0)  # what is being sent, and what arrives, comes first
                    begun = clock()
                    if (prompt := next(made, None)) is None:
                        break
                    ahead.append(prompt)
                    spare_s = max(spare_s, _SPARE_S + clock() - begun)
                await asyncio.sleep(max(0.0, due - clock()))
                tasks.create_task(self._send(ahead.popleft(), due, send))

    @staticmethod
    async def _send(prompt: Prompt, due_time: float, send: Send) -> None:
        await send(prompt, due_time)


@dataclass(frozen=True, slots=True)
class AwaitingLoop:
    """Prompts of sessions, each sent a while after the answers that it awaits; those that await none at their times.

    after:   of each prompt, the places of earlier ones.
    pause_s: of each, seconds after the last of these answers, or from the round's start.
    """

    name: RoundName
    prompts: Sequence[Prompt] = field(repr=False)
    after: Sequence[Sequence[int]] = field(repr=False)
    pause_s: Sequence[float] = field(repr=False)

    @property
    def expected(self) -> int:
        return len(self.prompts)

    @property
    def loop(self) -> Loop:
        return Loop.CLOSED

    async def play(self, send: Send, clock: RunClock) -> None:
        """A prompt is made during the pause before it. One whose request fails counts as answered."""
        awaited = [len(each) for each in self.after]
        awaiting: dict[int, list[int]] = {}
        for number, others in enumerate(self.after):
            for other in others:
                awaiting.setdefault(other, []).append(number)

        async def send_one(number: int, began: float, tasks: asyncio.TaskGroup) -> None:
            due = began + self.pause_s[number]
            await asyncio.sleep(max(0.0, due - _FEW_S - clock()))
            prompt = self.prompts[number]
            await asyncio.sleep(max(0.0, due - clock()))
            await send(prompt)
            for each in awaiting.get(number, ()):
                awaited[each] -= 1
                if not awaited[each]:
                    tasks.create_task(send_one(each, clock(), tasks))

        started = clock()
        async with asyncio.TaskGroup() as tasks:
            for number, left in enumerate(awaited):
                if not left:
                    tasks.create_task(send_one(number, started, tasks))


@dataclass(frozen=True, slots=True)
class Scale:
    """How much KV the workload should touch: `kv_cache_volume` GiB at `tokens_per_gb` tokens each (None: unknown)."""

    kv_cache_volume: float
    tokens_per_gb: int | None


class Length(NamedTuple):
    """What the longest request has at least, prompt and answer, and the flags that set it."""

    tokens: int
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The options of one workload: its fields are made with `option()`, and it makes the rounds.

    NAME:    what --workload takes. PREFIX: of its flags and keys.
    COUNTS:  the field that sets how many texts there are; 0 computes it from the KV cache volume.
    LENGTHS: the fields that set how long a request is; none if its texts come from elsewhere.
    """

    NAME: ClassVar[str]
    PREFIX: ClassVar[str]
    COUNTS: ClassVar[str]
    LENGTHS: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        check(self, f"{self.PREFIX}_")

    @property
    def count_flag(self) -> str:
        return f"--{self.PREFIX}-{self.COUNTS.replace('_', '-')}"

    @property
    def needs_scale(self) -> bool:
        """Whether tokens per GiB must be known."""
        return bool(getattr(self, self.COUNTS) == 0)

    @property
    def tokens_each(self) -> int:
        """Tokens of each text."""
        raise NotImplementedError

    @property
    def length(self) -> Length | None:
        """Of its longest request; None if its options do not say. What a chat template adds is not in it."""
        if not self.sized_by:
            return None
        flags = tuple(f"--{self.PREFIX}-{name}".replace("_", "-") for name in self.sized_by)
        return Length(self.tokens_each + self.tokens_answered, flags)

    @property
    def sized_by(self) -> tuple[str, ...]:
        """The fields of `LENGTHS`, if they count."""
        return self.LENGTHS

    @property
    def tokens_answered(self) -> int:
        """The most tokens of an answer, with what a request has besides its text, as far as `length` is known."""
        return 1

    @property
    def takes_tokenizer(self) -> bool:
        """Whether `token_rounds` has the requests if the client has the model's tokenizer."""
        return False

    @property
    def body(self) -> Mapping[str, Any]:
        """What each request's body has besides its messages and general settings."""
        return {}

    def count(self, scale: Scale) -> int:
        """How many texts: as asked, or as many as fill the volume, at least one.

        Raises: ConfigError if tokens per GiB would have to be known.
        """
        if not self.needs_scale:
            return int(getattr(self, self.COUNTS))
        if scale.tokens_per_gb is None:
            what = self.COUNTS.removeprefix("num_")
            raise ConfigError(f"the number of {what} is unknown: pass {self.count_flag} or --tokens-per-gb-kvcache")
        return max(1, int(scale.kv_cache_volume * scale.tokens_per_gb / self.tokens_each))

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[Round]:
        """The rounds in their order, the same for the same options and seed; makes their texts.

        The caller may leave some out, never the query round.
        """
        raise NotImplementedError

    def token_rounds(self, scale: Scale, seed: int, tokenizer: "ModelTokenizer") -> Sequence[Round]:
        """`rounds` with the requests that LMCache's bench sends if it can load the model's tokenizer.

        Raises: ConfigError if the tokenizer does not suit.
        """
        raise NotImplementedError
