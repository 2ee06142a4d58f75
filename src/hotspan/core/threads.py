"""All threads of this product: what one raises is logged and its owner is told, and a worker goes on.

    start(name, run)           one job, then its end             failed: told what it raised
    start_worker(name, run)    a loop until `is_over`            begun anew after what it raised
    go_on(name, run)           the same loop as a task of asyncio

A worker that does jobs of others has a net of its own around each job, which reports that one as failed.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""Between a worker's failure and its next beginning: one that fails at once must not fill the log."""

Failed = Callable[[Exception], object]


def start(
    name: str, run: Callable[[], object], *, failed: Failed | None = None, daemon: bool = True
) -> threading.Thread:
    """Run something on a thread that has begun when this returns. failed: told on that thread, if it raises."""

    def guarded() -> None:
        try:
            run()
        except Exception as error:  # the boundary: nobody else would see it
            logger.exception("thread_failed name=%s", name)
            if failed is not None:
                failed(error)

    return _begin(name, guarded, daemon=daemon)


def start_worker(
    name: str,
    run: Callable[[], object],
    *,
    is_over: Callable[[], bool],
    wait: Callable[[float], object] | None = None,
) -> threading.Thread:
    """Run a loop on a thread, anew after each exception, until it returns, or one comes when it `is_over`.

    wait: for a pause, such as that of the event that ends the loop.
    """
    pause = wait or threading.Event().wait

    def guarded() -> None:
        while True:
            try:
                run()
                return
            except Exception:  # the boundary: a mistake of ours must not end what others wait for
                logger.exception("thread_failed name=%s", name)
            if is_over():
                return
            pause(AGAIN_S)

    return _begin(name, guarded, daemon=True)


async def go_on(name: str, run: Callable[[], Awaitable[object]]) -> None:
    """Await what `run` gives, anew after each exception, until it returns or is cancelled."""
    while True:
        try:
            await run()
            return
        except Exception:  # the boundary: nobody looks at a task that is cancelled in the end
            logger.exception("task_failed name=%s", name)
        await asyncio.sleep(AGAIN_S)


def _begin(name: str, run: Callable[[], object], *, daemon: bool) -> threading.Thread:
    thread = threading.Thread(target=run, name=f"hotspan-{name}", daemon=daemon)
    thread.start()
    return thread
