"""Prefetches inside the engine's process: texts that are announced, brought into RAM also while the engine is idle."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hotspan.cache.prefetch import Found
from hotspan.cache.rhythm import Turn
from hotspan.core.clock import Clock
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
"""Beside requests the hashing of announced texts takes half the share of loads that nobody waits for: it is the
scheduler's own thread that hashes."""

WAITED_S = 10.0
"""How long the server waits for an announcement's answer (`DURABLE_S` of server/admin.py). One whose turn has not come
by then is dropped; one that is being hashed goes on, since the prefetch is of use without its answer."""

MAX_NAMED = 16
"""Announced texts of one tenant that wait to be hashed; with one more, its oldest is dropped. The server asks for three
at a time, of all tenants, but those of clients that went away stay here."""


@dataclass(slots=True, eq=False)
class _Announced:
    """A text that is to be hashed. begun: the thread that begins texts has done so. has_slices: hashing has begun."""

    begun: "Future[Naming]"
    tenant: int
    then: Callable[[Sequence[Chunk]], None]
    answer: "Future[dict[str, Any]]"
    since_s: float
    has_slices: bool = False


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
        self._namings: InTurn[_Announced] = InTurn()
        self._hash_s = 0.0  # when the next slice may be hashed beside requests
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
        if self._namings.count(tenant) >= MAX_NAMED:
            self._drop(self._namings.oldest(tenant))
        self._namings.add(tenant, _Announced(begun, tenant, then, answer, self._clock.monotonic()))
        begun.add_done_callback(lambda done: self._knock())
        self._wake()

    def turn(self) -> None:
        """On the scheduler's thread: begin what is due, and let prefetches go on."""
        self._hash()
        if self._rhythm is not None:
            for turn in self._rhythm.due():
                self._expect(turn)
        if self._prefetches.ends_s is not None:
            self._manager.cache.step()

    def close(self) -> None:
        """Stop looking at them."""
        self._closed = True
        self._woken.set()

    def _hash(self) -> None:
        """Hash the next slice of the oldest text of the tenant that has the turn; hand on a text behind its last."""
        now_s, is_busy = self._clock.monotonic(), self._prefetches.is_busy
        if not self._namings or (is_busy and now_s < self._hash_s):
            return
        text = self._next(now_s)
        if text is None:
            return
        began_s = time.thread_time()
        attempt(lambda: self._hash_slice(text), text.answer)
        self._hash_s = now_s + _HASH_RESTS * rest_s(time.thread_time() - began_s)
        if self._namings and not is_busy:
            self._knock()

    def _hash_slice(self, text: _Announced) -> None:
        """The text leaves the queue with its last slice, or with what fails."""
        text.has_slices, is_over = True, True
        try:
            naming = text.begun.result()
            is_over = naming.go_on()
        finally:
            if is_over:
                self._namings.discard(text.tenant, text)
        if is_over:
            text.then(in_order(naming.text.all_chunks()))

    def _next(self, now_s: float) -> _Announced | None:
        """The text of which a slice is hashed now; None if none has begun. Drops those that nobody waits for."""
        looked_at = 0
        while looked_at < self._namings.owners:
            text = self._namings.look()
            if text.answer.done() or (not text.has_slices and now_s - text.since_s > WAITED_S):
                self._drop(text)
                continue
            if text.begun.done():
                return text
            looked_at += 1
        return None

    def _drop(self, text: _Announced) -> None:
        self._namings.discard(text.tenant, text)
        text.begun.cancel()
        if not text.answer.done():
            text.answer.set_exception(TimeoutError("the text was not hashed in time: announce it again"))

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
            if self._prefetches.is_moving or self._namings:
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
