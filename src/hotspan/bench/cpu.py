"""CPU-seconds of a process and all its descendants."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import psutil

from hotspan.core.errors import ConfigError


class ProcessTreeCpu:
    """Counts the CPU time of a local server, which is several processes that come and go."""

    def __init__(self, pid: int) -> None:
        """Raises: ConfigError if no such process runs here."""
        try:
            self._root = psutil.Process(pid)
        except psutil.NoSuchProcess as error:
            raise ConfigError(f"--engine-pid {pid}: no such process on this machine; give the server's pid") from error

    def seconds(self) -> float | None:
        """User + system seconds of the tree so far, or None once the root has ended.

        A process that has ended is in its parent's `children_*` times as soon as the parent has waited for it, so
        nothing has to be remembered about it. One that ends while being read is counted by reading again.
        """
        for _ in range(5):
            try:
                processes = [self._root, *self._root.children(recursive=True)]
                return sum(_own_and_reaped_s(process) for process in processes)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                if not self._root.is_running():
                    return None
        return None


_WINDOW_S: Final = 0.3
_WINDOWS: Final = 10
_IDLE_CORES: Final = 0.05


async def settled_seconds(
    seconds: Callable[[], float | None], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> float | None:
    """The CPU-seconds so far, read once what the processes do in the background has come to rest.

    Rest is less than 5 % of a core over 0.3 s; after 3 s it is read regardless. None as soon as `seconds` says None.
    """
    before = seconds()
    for _ in range(_WINDOWS):
        await sleep(_WINDOW_S)
        now = seconds()
        if before is None or now is None:
            return None
        if now - before < _IDLE_CORES * _WINDOW_S:
            return now
        before = now
    return before


def _own_and_reaped_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    reaped = getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0)
    return float(times.user + times.system + reaped)
