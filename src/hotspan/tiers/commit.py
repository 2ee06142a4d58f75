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
    number: int
    scopes: Sequence[Scope]
    durable: Durable


class GroupCommit:
    """What a tier was told to invalidate and its log does not have yet. One thread submits.

    queue: of one thread, on which the log is written.
    write: given the number of the newest invalidation, counted from 1, and the scopes of all that it is to write.
           Blocks. Raises: OSError, after which none of them is durable.
    """

    def __init__(self, queue: IoQueue, write: Callable[[int, Sequence[Scope]], None]) -> None:
        self._queue = queue
        self._write = write
        self._number = 0
        self._pending: dict[int, ScopeSet] = {}
        self._waiting: deque[_Waiting] = deque()  # of those, what no thread has begun to write

    def __len__(self) -> int:
        return len(self._pending)

    def submit(self, scopes: Sequence[Scope], durable: Durable) -> None:
        """Write these scopes as soon as the log is free; `durable` is told on its thread, or here if it is closed."""
        self._number += 1
        self._pending[self._number] = ScopeSet(scopes)
        self._waiting.append(_Waiting(self._number, scopes, durable))
        self._queue.submit(lambda scratch: self._commit(), lambda: self._end(self._taken(), False), urgent=True)

    def concerns(self, tenant: int) -> bool:
        """Whether chunks of a tenant may be among what is not logged yet."""
        return any(scopes.concerns(tenant) for scopes in list(self._pending.values()))

    def takes(self, key: ChunkKey, namespace: bytes, terms: Terms) -> bool:
        """Whether what is not logged yet takes such a chunk, not counting what it stands on."""
        return any(scopes.takes(key, namespace, terms) for scopes in list(self._pending.values()))

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
            self._pending.pop(each.number, None)
