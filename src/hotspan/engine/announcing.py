"""Prefetches inside the engine's process: texts that are announced, brought into RAM also while the engine is idle."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hotspan.cache.prefetch import Found
from hotspan.cache.rhythm import Turn
from hotspan.core.clock import Clock
from hotspan.core.types import Chunk
from hotspan.engine.manager import HotspanManager

_PACE_S = 0.002
"""How often the scheduler's thread looks at prefetches while they move and it has nothing else to do."""


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
        if self._rhythm is not None:
            self._rhythm.on_due = self._wake

    def announce(self, chunks: Sequence[Chunk], tenant: int, hold_s: float, answer: "Future[dict[str, Any]]") -> None:
        """Bring chunks into RAM, each behind its parent; the answer comes when it is known what there is."""
        self._prefetches.begin(chunks, tenant, hold_s, lambda found: answer.set_result(self._said(found, hold_s)))
        self._wake()

    def turn(self) -> None:
        """On the scheduler's thread: begin what is due, and let prefetches go on."""
        if self._rhythm is not None:
            for turn in self._rhythm.due():
                self._expect(turn)
        if self._prefetches.ends_s is not None:
            self._manager.cache.step()

    def close(self) -> None:
        """Stop looking at them."""
        self._closed = True
        self._woken.set()

    def _expect(self, turn: Turn) -> None:
        """Bring the text of a session's next turn into RAM, unless it is there still."""
        rhythm, ram = self._rhythm, self._manager.cache.ram.entries
        if rhythm is not None and any(chunk.key not in ram for chunk in turn.chunks):
            ended = functools.partial(rhythm.note, turn.source)
            self._prefetches.begin(turn.chunks, turn.source.tenant, turn.hold_s, lambda found: None, ended)

    def _wake(self) -> None:
        """Have the thread look at what is to come, from now on."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._pace, name="hotspan-prefetch", daemon=True)
            self._thread.start()
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
            if self._prefetches.is_moving:
                time.sleep(_PACE_S)
            else:
                self._woken.wait(self._left_s())
                self._woken.clear()
            self._knock()

    def _left_s(self) -> float | None:
        """Until a prefetch ends or a turn is due: at least the pace, since the scheduler's thread may be in a step."""
        times = (self._prefetches.ends_s, self._rhythm.next_s if self._rhythm is not None else None)
        at_s = min((each for each in times if each is not None), default=None)
        return None if at_s is None else max(_PACE_S, at_s - self._clock.monotonic())
