"""Bodies of requests: read before anything is done for them, as many bytes as allowed and no slower than allowed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from hotspan.server.errors import HttpError
from hotspan.server.exchange import Exchange
from hotspan.server.settings import HttpSettings


class Bodies:
    """Reads bodies, and knows how many bytes of them are held."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._held = 0

    @contextlib.asynccontextmanager
    async def body(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The whole body, held until the end of the block.

        Raises: HttpError 413, 408 or 503; ClientGone.
        """
        self._check(int(exchange.headers.get("content-length", "0")), 0)
        body = bytearray()
        try:
            async for part in self._parts(exchange):
                self._check(len(body) + len(part), len(part))
                self._held += len(part)
                body += part
            yield bytes(body)
        finally:
            self._held -= len(body)

    async def _parts(self, exchange: Exchange) -> AsyncIterator[bytes]:
        limits, now = self._settings, asyncio.get_running_loop().time
        began_s, size, more = now(), 0, True
        while more:
            until_s = min(now() + limits.stall_s, began_s + limits.stall_s + size / limits.least_rate)
            try:
                async with asyncio.timeout_at(until_s):
                    part, more = await exchange.next_part()
            except TimeoutError as error:
                raise HttpError(
                    408,
                    f"the body came too slowly ({size} bytes in {now() - began_s:.0f} s): send it at once, at least "
                    f"{limits.least_rate / 1000:g} kB/s, and close it",
                ) from error
            size += len(part)
            yield part

    def _check(self, size: int, more: int) -> None:
        if size > self._settings.max_request_bytes:
            most = self._settings.max_request_bytes
            raise HttpError(413, f"the body is larger than {most:,} bytes: send less, or raise max_request_bytes")
        if self._held + more > self._settings.held_bytes:
            raise HttpError(503, "the server holds as many bytes of requests as it may: try again", retry_s=1)
