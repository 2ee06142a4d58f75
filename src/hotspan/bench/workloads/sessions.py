"""Conversations that go on in turn, and the two ways to keep a schedule of turns when one of them is still busy.

Three sessions, a turn due each second, and an answer in s1 that takes from second 1 to second 7:

    second    0     1     2     3     4     5     6     7
    open      s0    s1    s2    s0    -     s2    s0    s1              s1's second turn waits for its first
    closed    s0    s1    s2    s0    -     -     -     s1 s2 s0        and every turn after it waits, too
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from math import log1p
from random import Random
from typing import Literal

from hotspan.bench.records import Loop, RoundName
from hotspan.bench.workloads.base import Message, Prompt, RunClock, Send

Arrivals = Literal["even", "poisson"]


def due_times(qps: float, arrivals: Arrivals, seed: int) -> Iterator[float]:
    """When each request is due, in seconds from the start, without end: every 1/qps, or at random at that rate."""
    if arrivals == "even":
        yield from (number / qps for number in count())
    # Of all of random's methods only random() is promised to repeat across versions.
    rng, due_s = Random(seed), 0.0
    while True:
        due_s -= log1p(-rng.random()) / qps
        yield due_s


class Session:
    """One conversation: what was said so far. Whoever has the lock may ask."""

    def __init__(self, opening: tuple[Message, ...]) -> None:
        self.lock = asyncio.Lock()
        self._said = opening

    async def ask(self, question: str, request_id: str, max_tokens: int, send: Send, due_time: float) -> None:
        """One turn. An answer that failed leaves the conversation as it was, as if the question hadn't been asked."""
        record = await send(Prompt(request_id, question, max_tokens, self._said), due_time)
        if record.successful:
            self._said += (Message("user", question), Message("assistant", record.answer))


@dataclass(frozen=True, slots=True)
class ChatRound:
    """A turn of the next session whenever one is due, session by session and from the first again.

    openings:      what was said before, for each session.
    questions:     what the sessions are asked: each has its nth turn with the nth of them, and from the first again.
    due_s:         when each turn is due, in seconds from the round's start.
    stops_after_s: when a closed loop gives up the turns that it has not sent yet; None sends all of them.
    """

    name: RoundName
    openings: tuple[tuple[Message, ...], ...] = field(repr=False)
    questions: tuple[str, ...] = field(repr=False)
    due_s: tuple[float, ...] = field(repr=False)
    max_tokens: int
    loop: Loop
    stops_after_s: float | None = None

    @property
    def expected(self) -> int:
        return len(self.due_s)

    async def play(self, send: Send, clock: RunClock) -> None:
        """Send the turns in their order and return once all that were sent are answered."""
        sessions = [Session(opening) for opening in self.openings]
        started = clock()
        async with asyncio.TaskGroup() as tasks:
            for number, due_s in enumerate(self.due_s):
                await asyncio.sleep(max(0.0, started + due_s - clock()))
                session = sessions[number % len(sessions)]
                if self.loop is Loop.CLOSED:
                    await session.lock.acquire()
                    if self.stops_after_s is not None and clock() - started >= self.stops_after_s:
                        return
                tasks.create_task(self._turn(number, session, send, started + due_s))

    async def _turn(self, number: int, session: Session, send: Send, due_time: float) -> None:
        # The closed loop has the lock already. In the open one turns queue for it, first come first served.
        if self.loop is Loop.OPEN:
            await session.lock.acquire()
        try:
            turn, of_session = divmod(number, len(self.openings))
            question = self.questions[turn % len(self.questions)]
            await session.ask(question, f"s{of_session}_r{number}", self.max_tokens, send, due_time)
        finally:
            session.lock.release()
