"""Invalidations on their way to a tier's log: all that wait while it is busy are written at once, as one entry."""

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hotspan.core.scopes import ScopeSet
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import ChunkKey
from hotspan.tiers.base import Durable
from hotspan.tiers.io import IoQueue

logger = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """An invalidation that no thread has begun to write."""

    number: int
    scopes: Sequence[Scope]
    durable: Durable


class GroupCommit:
    """What a tier was told to invalidate and its log does not have yet. One thread (the scheduler's) calls it.

    However much that is, a chunk is compared with a few scopes only, and what was held back is looked at again when the
    invalidation that held it back is logged.

    queue: of one thread, on which the log is written.
    write: given the number of the newest invalidation, counted from 1, and the scopes of all that it is to write.
           Blocks. Raises: OSError, after which none of them is durable.
    """

    def __init__(self, queue: IoQueue, write: Callable[[int, Sequence[Scope]], None]) -> None:
        self._queue = queue
        self._write = write
        self._number = 0
        self._pending: dict[int, Sequence[Scope]] = {}
        self._scopes = ScopeSet()  # all of those
        self._waiting: deque[_Waiting] = deque()
        self._ended: deque[int] = deque()  # of the pending, what any thread has ended
        self._held: dict[int, dict[ChunkKey, None]] = {}  # by the newest invalidation that takes them
        self._released: dict[ChunkKey, None] = {}

    def __len__(self) -> int:
        self._settle()
        return len(self._pending)

    def submit(self, scopes: Sequence[Scope], durable: Durable) -> None:
        """Write these scopes as soon as the log is free; `durable` is told on its thread, or here if it is closed."""
        self._settle()
        self._number += 1
        self._pending[self._number] = scopes
        self._scopes.add(scopes, self._number)
        self._waiting.append(_Waiting(self._number, scopes, durable))
        self._queue.submit(lambda scratch: self._commit(), lambda: self._end(self._taken(), False), urgent=True)

    def concerns(self, tenant: int) -> bool:
        """Whether chunks of a tenant may be among what is not logged yet."""
        self._settle()
        return self._scopes.concerns(tenant)

    def takes(self, key: ChunkKey, namespace: bytes, terms: Terms) -> bool:
        """Whether what is not logged yet takes such a chunk, not counting what it stands on."""
        self._settle()
        return self._scopes.takes(key, namespace, terms)

    def hold_back(self, key: ChunkKey, namespace: bytes, terms: Terms) -> bool:
        """As `takes`; a chunk that is taken is among the `released` once the invalidation that takes it has ended."""
        self._settle()
        number = self._scopes.newest(key, namespace, terms)
        if number is None:
            return False
        self._held.setdefault(number, {})[key] = None
        return True

    def released(self) -> list[ChunkKey]:
        """The chunks that nothing holds back any more of what did when they were tried; each is reported once."""
        self._settle()
        released = list(self._released)
        self._released.clear()
        return released

    def give_up(self) -> None:
        """The log is written no more, and what is being written may never end: nothing is held back for it."""
        for keys in self._held.values():
            self._released |= keys
        self._held.clear()

    def _settle(self) -> None:
        """Bring the books in line with what has ended."""
        while self._ended:
            number = self._ended.popleft()
            self._scopes.discard(self._pending.pop(number), number)
            self._released |= self._held.pop(number, {})

    # -- the log's thread ----------------------------------------------------------------------------------------------

    def _commit(self) -> None:
        waiting = self._taken()
        if not waiting:
            return  # an earlier job wrote them
        try:
            self._write(waiting[-1].number, [scope for each in waiting for scope in each.scopes])
        except OSError as error:
            logger.warning("log_failed invalidations=%d error=%s", len(waiting), str(error))
            self._end(waiting, False)
        except Exception:  # a mistake of ours must not end the thread: every later receipt would wait for ever
            logger.exception("log_failed invalidations=%d", len(waiting))
            self._end(waiting, False)
        else:
            self._end(waiting, True)

    def _taken(self) -> list[_Waiting]:
        """All that waits, for who asks first."""
        waiting = []
        with contextlib.suppress(IndexError):
            while True:
                waiting.append(self._waiting.popleft())
        return waiting

    def _end(self, waiting: Sequence[_Waiting], done: bool) -> None:
        for each in waiting:
            each.durable(done)  # before it counts as logged: who is told that it failed gives the tier up
            self._ended.append(each.number)
