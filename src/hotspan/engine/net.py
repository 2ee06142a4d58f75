"""The net under what vLLM calls: whatever hotspan raises there leaves a request out of the cache, and no engine ends.

vLLM calls the connector and its manager on the engine core's loop, where an exception is fatal to all requests. Only
what can't be left undone stays outside the net: an engine that ends is better than one that answers from wrong KV
(tests/engine/test_net.py has the list, with reasons).
"""

import logging
from collections import Counter, deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")
_S = TypeVar("_S")


class LeftOut:
    """Counts requests that are not cached, by reason, for the engine's metrics. Each place is logged once."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._logged: set[tuple[str, type[BaseException]]] = set()

    def note(self, reason: str) -> None:
        """One more."""
        self.counts[reason] += 1

    def caught(self, where: str, error: Exception) -> None:
        """An exception was caught there; log its traceback the first time that one of its kind is."""
        self.note("error")
        if (where, type(error)) not in self._logged:
            self._logged.add((where, type(error)))
            logger.exception("request_left_out where=%s: it is not cached; this is a mistake, please report it", where)


LEFT_OUT = LeftOut()
"""Of this process's engine."""


class Unfinished:
    """What has to be done although something raised: it is tried again in each step, until nothing does."""

    def __init__(self) -> None:
        self._left: deque[tuple[str, Callable[[], None]]] = deque()

    def do(self, where: str, work: Callable[[], None], again: Callable[[], None] | None = None) -> bool:
        """Do it now; if it raises, do `again` (without one, the same) in later steps. Whether it did not.

        What raised may have been done in part.
        """
        try:
            work()
        except Exception as error:
            LEFT_OUT.caught(where, error)
            self._left.append((where, again or work))
            return False
        return True

    def step(self) -> None:
        """Try what is left once more."""
        for _ in range(len(self._left)):
            self.do(*self._left.popleft())

    def clear(self) -> None:
        """The cache was cleared: nothing of before has to be done any more."""
        self._left.clear()


def netted(
    instead: Callable[[], Any],
) -> Callable[[Callable[Concatenate[_S, _P], _T]], Callable[Concatenate[_S, _P], _T]]:
    """A method that answers what `instead` gives where it would raise.

    Its object may have `leave_out`, or `_leave_out`, which is told each argument then: nothing of that request is
    cached any more.
    """

    def with_net(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
        @wraps(method)
        def guarded(self: _S, /, *args: _P.args, **options: _P.kwargs) -> _T:
            try:
                return method(self, *args, **options)
            except Exception as error:
                LEFT_OUT.caught(method.__qualname__, error)
            leave_out = getattr(self, "leave_out", getattr(self, "_leave_out", None))
            try:
                if leave_out is not None:
                    for subject in args:
                        leave_out(subject)
            except Exception as error:
                LEFT_OUT.caught("leave_out", error)
            answer: _T = instead()
            return answer

        guarded.has_net = True  # type: ignore[attr-defined]
        return guarded

    return with_net


def has_net(method: Any) -> bool:
    """Whether a method is `netted`."""
    return getattr(method, "has_net", False)
