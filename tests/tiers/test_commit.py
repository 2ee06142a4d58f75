"""Invalidations on their way to a log: each is told once, whatever the log does, and those that wait are one entry."""

from collections.abc import Sequence

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.testing.chunks import key_of
from hotspan.tiers.commit import GroupCommit
from kit.simulated.inline import InlineQueues

NAMESPACE = bytes(32)


class Log:
    """What was written, and what it raises instead."""

    def __init__(self) -> None:
        self.written: list[tuple[int, list[Scope]]] = []
        self.error: Exception | None = None

    def write(self, number: int, scopes: Sequence[Scope]) -> None:
        if self.error is not None:
            raise self.error
        self.written.append((number, list(scopes)))


def test_those_that_wait_are_one_entry() -> None:
    """All that came while the log was busy is written at once, in order, under the number of the last."""
    queues, log, told = InlineQueues(), Log(), list[bool]()
    commits = GroupCommit(queues.queue("log", 1, 4096), log.write)
    for tenant in range(1, 6):
        commits.submit([Scope(tenant=tenant)], told.append)
    assert len(commits) == 5 and commits.concerns(3) and not commits.concerns(9)
    assert commits.takes(key_of("a"), NAMESPACE, Terms(tenant=3))
    queues.run()
    assert log.written == [(5, [Scope(tenant=tenant) for tenant in range(1, 6)])]
    assert told == [True] * 5 and len(commits) == 0 and not commits.concerns(3)


@pytest.mark.parametrize("error", [OSError("no"), ValueError("a mistake"), RecursionError()])
def test_a_log_that_fails_fails_those_that_wait(error: Exception) -> None:
    """Whatever the log raises, each is told that it is not durable, and the next is tried."""
    queues, log, told = InlineQueues(), Log(), list[bool]()
    commits = GroupCommit(queues.queue("log", 1, 4096), log.write)
    log.error = error
    commits.submit([Scope(tenant=1)], told.append)
    commits.submit([Scope(tenant=2)], told.append)
    queues.run()
    assert told == [False, False] and len(commits) == 0
    log.error = None
    commits.submit([Scope(tenant=3)], told.append)
    queues.run()
    assert told == [False, False, True] and log.written == [(3, [Scope(tenant=3)])]


def test_what_is_dropped_is_told() -> None:
    """Jobs that never begin, and a queue that is closed, leave nobody waiting."""
    queues, log, told = InlineQueues(), Log(), list[bool]()
    queue = queues.queue("log", 1, 4096)
    commits = GroupCommit(queue, log.write)
    queue.hung = True
    for tenant in range(1, 4):
        commits.submit([Scope(tenant=tenant)], told.append)
    queue.drop()
    assert told == [False] * 3
    queue.hung = False
    queue.close(1.0)
    commits.submit([Scope(tenant=4)], told.append)
    assert told == [False] * 4 and log.written == [] and len(commits) == 0
