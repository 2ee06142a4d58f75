"""Waiting for what another thread, task or process does. The bound only ends a test that hangs: nothing judges it."""

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_S = 60.0
"""How long a machine that others use may need for anything."""

Answer = TypeVar("Answer")


def until(holds: Callable[[], object], what: str = "the condition", within_s: float = PATIENCE_S) -> None:
    """Wait until a condition holds. Raises: AssertionError if it does not in time."""
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what}"
        time.sleep(0.005)


async def until_async(
    holds: Callable[[], object], *, within_s: float = PATIENCE_S, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """Wait until a condition holds, by the loop's clock, and let other tasks run. Raises: TimeoutError if it does not.

    meanwhile: is called before each nap.
    """
    async with asyncio.timeout(within_s):
        while not holds():
            meanwhile()
            await asyncio.sleep(0.005)


def at_last(ask: Callable[[], Answer]) -> Answer:
    """The answer, asked for again while a machine that stands still makes it an OSError."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return ask()
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.005)
