"""A server's process: it says when it is ready, and how it stops."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Protocol

import uvicorn

CUT_S = 3
"""Of the time to drain: for the errors of those that did not end, and for their connections."""


class Drainable(Protocol):
    """Who knows which requests are in work."""

    def drain(self) -> None:
        """Admit nobody from now on."""

    async def drained(self, within_s: float) -> object:
        """Return when the last request has ended, or is to be cut off because it has not by then."""


class DrainingServer(uvicorn.Server):
    """uvicorn that drains on the first signal and cuts off on the second.

    The port stays open while requests in flight go on to their end, so that whoever comes is told to go elsewhere.
    """

    def __init__(
        self, config: uvicorn.Config, requests: Drainable, drain_s: float, ready_line: Callable[[], str]
    ) -> None:
        super().__init__(config)
        self._requests = requests
        self._drain_s = drain_s
        self._ready_line = ready_line
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self._ready_line(), flush=True)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop, number)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _stop(self, number: signal.Signals) -> None:
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            return
        print(f"hotspan stops on {signal.Signals(number).name}: requests in flight go on to their end", flush=True)
        self._requests.drain()
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await self._requests.drained(max(self._drain_s - CUT_S, 0))
        self.should_exit = True
