"""Clients that send next to nothing, and never end: half of them a head, half of them a body."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator

BYTE_S = 2.0
_HEAD = b"POST /invocations HTTP/1.1\r\nhost: h\r\n"
_BODY = _HEAD + b"content-type: application/json\r\ncontent-length: 100000\r\n\r\n"


class SlowSockets:
    """So many connections, each a byte every `BYTE_S`; whom the server closes comes back."""

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._count = count
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self.open = 0

    def run(self) -> None:
        """Until `stop`."""
        self._loop.run_until_complete(self._run())
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)

    async def _run(self) -> None:
        tasks = [asyncio.create_task(self._dawdle(number)) for number in range(self._count)]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dawdle(self, number: int) -> None:
        await asyncio.sleep(number / self._count)
        while True:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
                self.open += 1
                try:
                    writer.write(_BODY if number % 2 else _HEAD + b"x-slow: ")
                    while not reader.at_eof():
                        await asyncio.sleep(BYTE_S)
                        writer.write(b"a")
                finally:
                    self.open -= 1
                    writer.transport.abort()
            await asyncio.sleep(0.1)


@contextlib.contextmanager
def slow_sockets(port: int, count: int) -> Iterator[SlowSockets]:
    """They, for the block, which begins when nearly all are connected."""
    sockets = SlowSockets(port, count)
    thread = threading.Thread(target=sockets.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    try:
        while sockets.open < 0.95 * count:
            assert time.monotonic() < deadline, f"only {sockets.open} of {count} connections are held"
            time.sleep(0.02)
        yield sockets
    finally:
        sockets.stop()
        thread.join(60)
