"""Bodies of requests: read before anything is done for them, as many bytes as allowed and no slower than allowed.

Each principal has a part of the memory, and of the bodies that are read at a time, that no other principal can use.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from hotspan.core.budget import Budget
from hotspan.server.errors import HttpError
from hotspan.server.exchange import Exchange
from hotspan.server.principal import Principal, current_principal
from hotspan.server.settings import HttpSettings


class Bodies:
    """Reads bodies, and counts the bytes and the bodies of each principal."""

    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        self._held = Budget(settings.held_bytes, settings.principals)
        self._uploads = Budget(settings.connections // 2, settings.principals)

    @contextlib.asynccontextmanager
    async def body(self, exchange: Exchange) -> AsyncIterator[bytes]:
        """The whole body, held until the end of the block.

        Raises: HttpError 413, 408 or 503; ClientGone.
        """
        owner = current_principal()
        self._check(int(exchange.headers.get("content-length", "0")))
        body = bytearray()
        try:
            with self._uploading(owner):
                async for part in self._parts(exchange):
                    self._check(len(body) + len(part))
                    if not self._held.take(owner, len(part)):
                        raise HttpError(503, "your requests hold as much memory as they may: try again", retry_s=1)
                    body += part
            yield bytes(body)
        finally:
            self._held.give(owner, len(body))

    @contextlib.contextmanager
    def _uploading(self, owner: Principal) -> Iterator[None]:
        if not self._uploads.take(owner, 1):
            raise HttpError(503, "as many of your requests' bodies are on their way as may be: try again", retry_s=1)
        try:
            yield
        finally:
            self._uploads.give(owner, 1)

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

    def _check(self, size: int) -> None:
        most = self._settings.max_request_bytes
        if size > most:
            raise HttpError(413, f"the body is larger than {most:,} bytes: send less, or raise max_request_bytes")
