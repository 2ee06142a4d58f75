"""How long things take on a machine that others use, too."""

import time
from collections.abc import Awaitable, Callable

TRIES = 5


def quickest_s(act: Callable[[], object], enough_s: float) -> float:
    """The least seconds that `act` took: it is tried again, up to five times, until it takes less than `enough_s`.

    A machine that stands still makes one try slow; what is slow by itself makes all of them slow.
    """
    least_s = float("inf")
    for _ in range(TRIES):
        began_s = time.monotonic()
        act()
        least_s = min(least_s, time.monotonic() - began_s)
        if least_s < enough_s:
            break
    return least_s


async def quickest_async_s(act: Callable[[], Awaitable[object]], enough_s: float) -> float:
    """`quickest_s` of what is awaited."""
    least_s = float("inf")
    for _ in range(TRIES):
        began_s = time.monotonic()
        await act()
        least_s = min(least_s, time.monotonic() - began_s)
        if least_s < enough_s:
            break
    return least_s
