"""What something costs, without a clock: the lines of Python that it runs and the functions of C that it calls."""

import gc
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class Operations:
    """How many lines and calls there were; what one call of C does by itself, as sorting or copying, is one."""

    count: int = 0


@contextmanager
def counted() -> Iterator[Operations]:
    """Count what this thread does in functions that are called meanwhile, by an event loop among others."""
    found = Operations()

    def line(frame: Any, event: str, argument: object) -> Any:
        found.count += 1
        return line

    def call(frame: Any, event: str, argument: object) -> None:
        found.count += event == "c_call"

    tracing, profiling = sys.gettrace(), sys.getprofile()
    sys.settrace(line)
    sys.setprofile(call)
    try:
        yield found
    finally:
        sys.setprofile(profiling)
        sys.settrace(tracing)


def operations(act: Callable[[], object]) -> int:
    """How many lines and calls `act` takes."""
    gc.disable()  # it would run lines of what other tests left; collecting that first takes a second each time
    try:
        with counted() as found:
            act()
            count = found.count  # before the context ends, whose own lines count
    finally:
        gc.enable()
    return count


def in_one_go(work: Coroutine[Any, Any, T], between: Callable[[], object] = lambda: None) -> T:
    """The result of a coroutine that waits for nothing but its own pauses. between: is called in each of them."""
    while True:
        try:
            assert work.send(None) is None
        except StopIteration as end:
            result: T = end.value
            return result
        between()
