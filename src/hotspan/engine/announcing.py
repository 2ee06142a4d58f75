"""Prefetches inside the engine's process: texts that are announced, brought into RAM also while the engine is idle."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hotspan.cache.prefetch import Found
from hotspan.cache.rhythm import Turn
from hotspan.core.clock import Clock
from hotspan.core.terms import Scope
from hotspan.core.threads import start_worker
from hotspan.core.turns import InTurn
from hotspan.core.types import Chunk
from hotspan.engine.answers import attempt
from hotspan.engine.manager import HotspanManager
from hotspan.engine.requests import in_order
from hotspan.engine.texts import Naming
from hotspan.tiers.pace import rest_s

_PACE_S = 0.002
"""How often the scheduler's thread looks at prefetches while they move and it has nothing else to do."""

_BUSY_PACE_S = 0.05
"""How often the thread wakes while the engine has requests: each step looks by itself, and each waking delays one."""

_HASH_RESTS = 2
"""Beside requests the hashing of announced texts takes half the share of loads that nobody waits for, and so does the
search for labels: it is the scheduler's own thread that does both."""

WAITED_S = 10.0
"""How long the server waits for an announcement's answer (`DURABLE_S` of server/admin.py). One whose turn has not come
by then is dropped; one that is being hashed goes on, since the prefetch is of use without its answer."""

MAX_NAMED = 16
"""Announcements of one tenant that wait to be hashed, and that wait to be found by labels; with one more, its oldest is
dropped. The server asks for three at a time, of all tenants, but those of clients that went away stay here."""


@dataclass(eq=False)
class _Announced:
    """What waits for its tenant's turn. is_begun: it has had one."""

    tenant: int
    then: Callable[[Sequence[Chunk]], None]
    answer: "Future[dict[str, Any]]"
    since_s: float
    is_begun: bool = field(default=False, init=False)

    @property
    def is_ready(self) -> bool:
        """Whether a turn is of use to it."""
        return True

    def cancel(self) -> None:
        """It has no turn any more."""


@dataclass(eq=False)
class _Labels(_Announced):
    """What is to be found by its labels."""

    scope: Scope


@dataclass(eq=False)
class _Text(_Announced):
    """What is to be hashed. naming: once the thread that begins texts has begun it."""

    naming: "Future[Naming]"

    @property
    def is_ready(self) -> bool:
        return self.naming.done()

    def cancel(self) -> None:
        self.naming.cancel()


_A = TypeVar("_A", bound=_Announced)


class Announcer:
    """Begins prefetches, and has the scheduler's thread look at them. `knock` calls `turn` there, soon."""

    def __init__(self, manager: HotspanManager, replica: str, knock: Callable[[], None], clock: Clock) -> None:
        self._manager = manager
        self._prefetches = manager.cache.prefetches
        self._rhythm = manager.rhythm
        self._replica = replica
        self._knock = knock
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._woken = threading.Event()
        self._closed = False
        self._namings: InTurn[_Text] = InTurn()
        self._labelled: InTurn[_Labels] = InTurn()
        self._hash_s = self._find_s = 0.0  # when the next slice may be hashed, and labels be searched, beside requests
        if self._rhythm is not None:
            self._rhythm.on_due = self._wake

    def announce(
        self, chunks: Sequence[Chunk], tenant: int, hold_s: float | None, answer: "Future[dict[str, Any]]"
    ) -> None:
        """Bring chunks into RAM, each behind its parent; the answer comes when it is known what there is.

        hold_s: None only asks what there is, and changes nothing.
        """
        if hold_s is None:
            self._look_up(chunks, tenant, answer)
            return
        self._prefetches.begin(chunks, tenant, hold_s, lambda found: answer.set_result(self._said(found, hold_s)))
        self._wake()

    def _look_up(self, chunks: Sequence[Chunk], tenant: int, answer: "Future[dict[str, Any]]") -> None:
        """Say what tiers have of chunks, and change nothing; the answer comes when they have said it."""

        def told(found: Found) -> None:
            known = {tier.value: self._amount(count) for tier, count in found.chunks.items()}
            answer.set_result({"replica": self._replica, "found": known, "asked": self._amount(len(chunks))})

        self._prefetches.look_up(chunks, tenant, told)
        self._wake()

    def named(
        self,
        begun: "Future[Naming]",
        tenant: int,
        then: Callable[[Sequence[Chunk]], None],
        answer: "Future[dict[str, Any]]",
    ) -> None:
        """Call `then` with the chunks of a text, once it is named: a slice in each turn, beside requests with little
        of a core. Tenants take turns, slice by slice. On the scheduler's thread.
        """
        self._add(self._namings, _Text(tenant, then, answer, self._clock.monotonic(), begun))
        begun.add_done_callback(lambda done: self._knock())

    def labelled(
        self, scope: Scope, tenant: int, then: Callable[[Sequence[Chunk]], None], answer: "Future[dict[str, Any]]"
    ) -> None:
        """Call `then` with what a tenant has under labels: one such search between two steps, in turns of tenants."""
        self._add(self._labelled, _Labels(tenant, then, answer, self._clock.monotonic(), scope))

    def turn(self) -> None:
        """On the scheduler's thread: begin what is due, and let prefetches go on."""
        self._hash()
        self._find()
        if self._rhythm is not None:
            for turn in self._rhythm.due():
                self._expect(turn)
        if self._prefetches.ends_s is not None:
            self._manager.cache.step()

    def close(self) -> None:
        """Stop looking at them."""
        self._closed = True
        self._woken.set()

    def _add(self, queue: InTurn[_A], asked: _A) -> None:
        """Have it wait for its tenant's turn, and the tenant's oldest no longer if these are too many."""
        if queue.count(asked.tenant) >= MAX_NAMED:
            self._drop(queue, queue.oldest(asked.tenant))
        queue.add(asked.tenant, asked)
        self._wake()

    def _find(self) -> None:
        """Search for the labels that are next in turn. A pass over the disk's table takes milliseconds for a tenant
        with 100,000 chunks there: beside requests searches have as little of a core as hashing.
        """
        now_s, is_busy = self._clock.monotonic(), self._prefetches.is_busy
        if not self._labelled or (is_busy and now_s < self._find_s):
            return
        if (asked := self._next(self._labelled)) is None:
            return
        self._labelled.discard(asked.tenant, asked)
        began_s = time.thread_time()
        attempt(lambda: asked.then(self._manager.cache.labelled(asked.scope)), asked.answer)
        self._find_s = now_s + _HASH_RESTS * rest_s(time.thread_time() - began_s)
        if self._labelled and not is_busy:
            self._knock()

    def _hash(self) -> None:
        """Hash the next slice of the oldest text of the tenant that has the turn; hand on a text behind its last."""
        now_s, is_busy = self._clock.monotonic(), self._prefetches.is_busy
        if not self._namings or (is_busy and now_s < self._hash_s):
            return
        if (text := self._next(self._namings)) is None:
            return
        began_s = time.thread_time()
        attempt(lambda: self._hash_slice(text), text.answer)
        self._hash_s = now_s + _HASH_RESTS * rest_s(time.thread_time() - began_s)
        if self._namings and not is_busy:
            self._knock()

    def _hash_slice(self, text: _Text) -> None:
        """The text leaves the queue with its last slice, or with what fails."""
        text.is_begun = is_over = True
        try:
            naming = text.naming.result()
            is_over = naming.go_on()
        finally:
            if is_over:
                self._namings.discard(text.tenant, text)
        if is_over:
            text.then(in_order(naming.text.all_chunks()))

    def _next(self, queue: InTurn[_A]) -> _A | None:
        """What is looked at now, and stays first of its tenant's; None if nothing can be. Drops what nobody awaits."""
        looked_at, now_s = 0, self._clock.monotonic()
        while looked_at < queue.owners:
            asked = queue.look()
            if asked.answer.done() or (not asked.is_begun and now_s - asked.since_s > WAITED_S):
                self._drop(queue, asked)
                continue
            if asked.is_ready:
                return asked
            looked_at += 1
        return None

    def _drop(self, queue: InTurn[_A], asked: _A) -> None:
        queue.discard(asked.tenant, asked)
        asked.cancel()
        if not asked.answer.done():
            asked.answer.set_exception(TimeoutError("the announcement's turn did not come in time: repeat it"))

    def _expect(self, turn: Turn) -> None:
        """Bring the text of a session's next turn into RAM, unless it is there still."""
        rhythm, ram = self._rhythm, self._manager.cache.ram.entries
        if rhythm is not None and any(chunk.key not in ram for chunk in turn.chunks):
            ended = functools.partial(rhythm.note, turn.source)
            self._prefetches.begin(turn.chunks, turn.source.tenant, turn.hold_s, lambda found: None, ended)

    def _wake(self) -> None:
        """Have the thread look at what is to come, from now on."""
        if self._thread is None:
            self._thread = start_worker("prefetch", self._pace, is_over=lambda: self._closed)
        self._woken.set()

    def _said(self, found: Found, hold_s: float) -> dict[str, Any]:
        started = self._amount(found.started) | {"bytes": found.started * self._manager.cache.ram.slab.slot_bytes}
        known = {tier.value: self._amount(chunks) for tier, chunks in found.chunks.items()}
        return {"replica": self._replica, "found": known, "started": started, "hold_s": hold_s}

    def _amount(self, chunks: int) -> dict[str, int]:
        """Chunks of all KV cache groups, and the tokens of a text that has so many."""
        return {"chunks": chunks, "tokens": chunks * self._manager.chunk_tokens // self._manager.group_count}

    def _pace(self) -> None:
        while not self._closed:
            if self._prefetches.is_moving or self._namings or self._labelled:
                time.sleep(_BUSY_PACE_S if self._prefetches.is_busy else _PACE_S)
            else:
                self._woken.wait(self._left_s())
                self._woken.clear()
            self._knock()

    def _left_s(self) -> float | None:
        """Until a prefetch ends or a turn is due: at least the pace, since the scheduler's thread may be in a step."""
        times = (self._prefetches.ends_s, self._rhythm.next_s if self._rhythm is not None else None)
        at_s = min((each for each in times if each is not None), default=None)
        return None if at_s is None else max(_PACE_S, at_s - self._clock.monotonic())
