"""How requests come: clients that each wait for their answer, or arrivals at random times that wait for nobody."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from hotspan.bench.workloads.base import Prompt, RunClock, Send
from hotspan.bench.workloads.sessions import due_times


class Turn(NamedTuple):
    """One request of a session. think_s: how long its client waits, before it asks, since the turn before."""

    prompt: Prompt
    session: str
    think_s: float = 0.0


class Plays(Protocol):
    """Requests in an order."""

    async def play(self, send: Send, clock: RunClock) -> None:
        """Send everything and return once all of it is answered."""
        ...


class Locks:
    """One lock per session: its turns wait for each other, in their order."""

    def __init__(self, turns: Sequence[Turn]) -> None:
        self._locks = {turn.session: asyncio.Lock() for turn in turns}

    async def send(self, turn: Turn, send: Send, due_time: float | None = None) -> None:
        async with self._locks[turn.session]:
            await send(turn.prompt, due_time)


async def _at_once(clients: int, client: Callable[[], Coroutine[None, None, None]]) -> None:
    async with asyncio.TaskGroup() as tasks:
        for _ in range(clients):
            tasks.create_task(client())


@dataclass(frozen=True, slots=True)
class Clients:
    """So many clients; each takes the next turn when its own was answered."""

    turns: Sequence[Turn] = field(repr=False)
    clients: int

    async def play(self, send: Send, clock: RunClock) -> None:
        """Turns begin in their order. One whose session is busy holds up its client."""
        left, locks = deque(self.turns), Locks(self.turns)

        async def client() -> None:
            while left:
                await locks.send(left.popleft(), send)

        await _at_once(self.clients, client)


@dataclass(frozen=True, slots=True)
class Thinking:
    """So many clients; each plays one session after the other, and thinks between two turns."""

    turns: Sequence[Turn] = field(repr=False)
    clients: int

    async def play(self, send: Send, clock: RunClock) -> None:
        sessions: dict[str, list[Turn]] = {}
        for turn in self.turns:
            sessions.setdefault(turn.session, []).append(turn)
        left = deque(sessions.values())

        async def client() -> None:
            while left:
                for turn in left.popleft():
                    await asyncio.sleep(turn.think_s)
                    await send(turn.prompt, None)

        await _at_once(self.clients, client)


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Turns at Poisson times, the same for the same seed; one whose session is busy waits for it, and that counts."""

    turns: Sequence[Turn] = field(repr=False)
    per_s: float
    seed: int

    async def play(self, send: Send, clock: RunClock) -> None:
        locks, started = Locks(self.turns), clock()
        due = islice(due_times(self.per_s, "poisson", self.seed), len(self.turns))
        async with asyncio.TaskGroup() as tasks:
            for turn, due_s in zip(self.turns, due, strict=True):
                await asyncio.sleep(max(0.0, started + due_s - clock()))
                tasks.create_task(locks.send(turn, send, started + due_s))
