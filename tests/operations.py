"""What something costs, without a clock: the lines of Python that it runs and the functions of C that it calls."""

import sys
from collections.abc import Callable
from typing import Any


def operations(act: Callable[[], object]) -> int:
    """How many lines and calls `act` takes; what one call of C does by itself, as sorting or copying, is one."""
    count = 0

    def line(frame: Any, event: str, argument: object) -> Any:
        nonlocal count
        count += 1
        return line

    def call(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "c_call"

    tracing, profiling = sys.gettrace(), sys.getprofile()
    sys.settrace(line)
    sys.setprofile(call)
    try:
        act()
    finally:
        sys.setprofile(profiling)
        sys.settrace(tracing)
    return count
