"""Many conversations that come back turn after turn: what a cache is for whose upper tier can't hold all of them.

The request stream of the defaults is that of `lmcache bench engine` (LMCache 0.5.6, Apache-2.0): texts, order, times, a
busy session that holds back the others (benchmarks/peers/streams.py compares them). What is wrong with that stream is
an option away: the system prompt that isn't shared (`--mrc-system-prompt shared`), the closed loop
(`--mrc-loop open`), words that aren't tokens (`--mrc-text prose`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice, takewhile
from math import ceil
from typing import ClassVar, Final, Literal

from hotspan.bench.records import Loop, RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Message, Prompt, Round, Scale, WorkloadOptions
from hotspan.bench.workloads.sessions import ChatRound, due_times
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL, POSITIVE
from hotspan.config.options import option

ACKNOWLEDGEMENT: Final = "Understood, I have read the context above."

_OPENING: Final = "You are a helpful assistant. "
_PRE_WARM_UP_REQUESTS: Final = 4


@dataclass(frozen=True, slots=True)
class MultiRoundChatOptions(WorkloadOptions):
    """The flags `--mrc-*`."""

    NAME: ClassVar[str] = "multi-round-chat"
    PREFIX: ClassVar[str] = "mrc"
    COUNTS: ClassVar[str] = "num_sessions"
    LENGTHS: ClassVar[tuple[str, ...]] = ("shared_prompt_length", "chat_history_length", "output_length")

    shared_prompt_length: int = option(2000, "Tokens per system prompt.", kind=COUNT)
    chat_history_length: int = option(10_000, "Tokens of chat history before the first turn of a session.", kind=COUNT)
    user_input_length: int = option(50, "Tokens per question.", kind=COUNT)
    output_length: int = option(200, "Maximum number of tokens per answer.", kind=COUNT)
    qps: float = option(1.0, "Request rate over all sessions, in turns per second.", kind=POSITIVE)
    duration: float = option(
        60.0, "Duration of the run, in seconds. Requests that were sent by then are completed.", kind=POSITIVE
    )
    loop: Literal["closed", "open"] = option(
        "closed",
        "closed: a session that waits for its answer delays all later turns. open: it delays its own turns only.",
    )
    arrivals: Literal["even", "poisson"] = option(
        "even", "Distribution of arrivals: even (constant intervals) or poisson."
    )
    system_prompt: Literal["numbered", "shared"] = option(
        "numbered",
        "System prompts: numbered (different for each session, nothing is shared) or shared (the same for all).",
    )
    text: Literal["filler", "prose"] = option(
        "filler", "Text of the prompts: filler (one word repeated) or prose (varied text)."
    )
    num_sessions: int = option(0, "Number of sessions. Default: computed from --kv-cache-volume.", kind=NATURAL)
    num_requests: int = option(
        0, "Number of turns to send, instead of --mrc-duration. Default: use --mrc-duration.", kind=NATURAL
    )

    @property
    def tokens_each(self) -> int:
        """Before the first turn."""
        return self.shared_prompt_length + self.chat_history_length

    @property
    def tokens_answered(self) -> int:
        return self.user_input_length + self.output_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[Round]:
        """Pre-warm-up on texts of their own, each session once alone, the turns as they are due, first turns alone."""
        texts = _Texts(self, seed, count_tokens)
        openings = tuple([await texts.opening(number) for number in range(self.count(scale))])
        due = due_times(self.qps, self.arrivals, seed)
        number = self.num_requests
        due_s = tuple(islice(due, number) if number else takewhile(lambda at_s: at_s < self.duration, due))
        turns = max(1, ceil(len(due_s) / len(openings)))
        questions = tuple([await texts.question(turn) for turn in range(turns)])
        first = pre_warm_up(_PRE_WARM_UP_REQUESTS, self.tokens_each, self.output_length)
        warm_up = tuple(Prompt(f"warmup_s{i}", "Hello", 1, opening) for i, opening in enumerate(openings))
        # Later turns hold what was answered before; the first ones are the same for every server.
        check = tuple(
            Prompt(f"s{i}_r{i}", questions[0], self.output_length, opening) for i, opening in enumerate(openings)
        )
        query = ChatRound(
            name=RoundName.QUERY,
            openings=openings,
            questions=questions,
            due_s=due_s,
            max_tokens=self.output_length,
            loop=Loop(self.loop),
            stops_after_s=None if number else self.duration,
        )
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, _PRE_WARM_UP_REQUESTS),
            ClosedLoop(RoundName.WARM_UP, warm_up),
            query,
            ClosedLoop(RoundName.CHECK, check),
        )


class _Texts:
    """What the sessions say, in filler or in prose. No two texts share more than a system prompt that is shared."""

    def __init__(self, options: MultiRoundChatOptions, seed: int, count_tokens: CountTokens) -> None:
        self._options = options
        self._count_tokens = count_tokens
        # Seeds of two runs with neighbouring --seed must not share texts.
        self._seed = seed * 1_000_003
        self._shared: str | None = None

    async def opening(self, number: int) -> tuple[Message, ...]:
        """System prompt, history and the assistant's acknowledgement of one session."""
        said = f"[Session {number} history] "
        history = await self._text(said, "hi", self._options.chat_history_length, 3 * number + 1)
        system = await self._system_prompt(number)
        return Message("system", system), Message("user", history), Message("assistant", ACKNOWLEDGEMENT)

    async def question(self, turn: int) -> str:
        """What every session is asked in that turn; what was said before tells the sessions apart."""
        return await self._text("", "tell", self._options.user_input_length, 3 * turn + 2)

    async def _system_prompt(self, number: int) -> str:
        length = self._options.shared_prompt_length
        if self._options.system_prompt == "numbered":
            return await self._text(f"Session {number}. {_OPENING}", "help", length, 3 * number)
        if self._shared is None:
            self._shared = await self._text(_OPENING, "help", length, 0)
        return self._shared

    async def _text(self, opening: str, filler: str, length: int, number: int) -> str:
        """`opening` and more, together `length` words of filler, or tokens of prose."""
        if self._options.text == "prose":
            return await fitted_prose(opening, self._seed + number, length, self._count_tokens)
        return opening + " ".join([filler] * max(0, length - len(opening.split())))
