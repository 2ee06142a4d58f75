"""Bodies of requests, within limits of rate, size and memory.

Each owner has a part of the memory, and of the bodies that are read at a time, that no other owner can use.
"""

import asyncio
from collections.abc import Callable, Generator, Hashable
from types import TracebackType
from typing import Protocol, Self, TypeVar

from hotspan.http.connections import DIVERT, WHOLE, Divert, HttpLimits
from hotspan.http.errors import HttpError
from hotspan.http.exchange import Exchange

MAX_TEXT_BYTES = "max_text_bytes"
TEXT_NEEDS = "what text that fits this model can need: send less, or raise max_text_bytes"
ROUTE_NEEDS = "what a request of this kind can need: send less"
"""Why a body has fewer bytes than any may have."""

LOG = "log"
"""In the answer to a health check: how large a body may be whose prompt is text."""


class Target(Protocol):
    """Memory that a body is read into."""

    def buffer(self) -> memoryview:
        """Where the next bytes go; not empty before the end."""
        ...

    def received(self, size: int) -> None:
        """So many bytes were written there."""
        ...


class Pace:
    """Inside, a body has as much time as `limits` give it. Raises: HttpError 408 once it comes too slowly."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._now = asyncio.get_running_loop().time
        self._began_s = self._now()
        self._size = 0
        self._timeout = asyncio.timeout_at(self._began_s + limits.stall_s)

    def came(self, size: int) -> None:
        """So many bytes more came."""
        self._size += size
        owed_s = self._began_s + self._size / self._limits.least_rate
        self._timeout.reschedule(min(self._now(), owed_s) + self._limits.stall_s)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise HttpError(
                408,
                f"the body came too slowly ({self._size} bytes in {self._now() - self._began_s:.0f} s): send it at "
                f"once, at least {self._limits.least_rate / 1000:g} kB/s, and close it",
            ) from late


async def read_parts(exchange: Exchange, limits: HttpLimits, take: Callable[[bytes], None]) -> None:
    """Give each part of a body to `take`. Raises: HttpError 408 if it comes too slowly; ClientGone."""
    if WHOLE in exchange.scope:  # as most small requests: it needs no deadline
        take((await exchange.part())[0])
        return
    more = True
    async with Pace(limits) as pace:
        while more:
            part, more = await exchange.part()
            take(part)
            if more:
                pace.came(len(part))


async def read_into(exchange: Exchange, limits: HttpLimits, size: int, target: Target) -> None:
    """Read a body of `size` bytes into memory: from the socket, but for what came with the head.

    Raises: as `read_parts`; nothing is written to `target` after that.
    """
    divert: Divert = exchange.scope[DIVERT]
    more = True
    async with Pace(limits) as pace:

        def came(received: int) -> None:
            target.received(received)
            pace.came(received)

        try:
            while more:
                part, more = await exchange.part()
                size -= len(part)
                rest = memoryview(part)
                while rest:
                    into = target.buffer()[: len(rest)]
                    into[:] = rest[: len(into)]
                    rest = rest[len(into) :]
                    came(len(into))
                if more:
                    divert(size, target.buffer, came)
        finally:
            divert(0, target.buffer, came)


T = TypeVar("T")


async def in_slices(steps: Generator[None, None, T]) -> T:
    """The result of work that pauses, with the event loop's other work in its pauses. Raises: as the work does."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)


class Budget:
    """One half of `amount` is divided equally between the owners; the other half goes to whoever asks first.

    Each owner has at least 1 of its own. With more owners than that half has units, all together may therefore use
    more than `amount`: the caller limits the sum where that matters. Not for several threads at once.

    owners: how many there can be.
    used:   by all owners together.
    """

    def __init__(self, amount: int, owners: int) -> None:
        self.own = max(1, amount // 2 // max(1, owners))
        self._shared = amount - min(self.own * owners, amount // 2)
        self._shared_used = 0
        self._used: dict[Hashable, int] = {}

    @property
    def used(self) -> int:
        return sum(self._used.values())

    @property
    def most(self) -> int:
        """What one owner can use, while others use nothing of what is shared."""
        return self.own + self._shared

    def take(self, owner: Hashable, amount: int) -> bool:
        """Whether `owner` now uses so much more; if not, nothing has changed."""
        used = self._used.get(owner, 0)
        if used + amount <= self.own:
            self._used[owner] = used + amount
            return True
        shared = self._beyond(used + amount) - self._beyond(used)
        if shared > self._shared - self._shared_used:
            return False
        self._shared_used += shared
        self._used[owner] = used + amount
        return True

    def give(self, owner: Hashable, amount: int) -> None:
        """`owner` uses so much less."""
        used = self._used.pop(owner, 0)
        left = used - amount
        if used > self.own:
            self._shared_used -= self._beyond(used) - self._beyond(left)
        if left:
            self._used[owner] = left

    def _beyond(self, used: int) -> int:
        """What of it is beyond the owner's part."""
        return max(0, used - self.own)


class Bodies:
    """Reads bodies, and counts the bytes and the bodies of each owner."""

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self._held = Budget(limits.held_bytes, limits.principals)
        self._uploads = Budget(limits.connections // 2, limits.principals)

    def body(self, exchange: Exchange, owner: Hashable, most: int | None = None, needs: str = TEXT_NEEDS) -> "HeldBody":
        """A context manager with the whole body, which counts as `owner`'s until the end of the block.

        most:   bytes that a body at this route can need, where that is less than any body may have; `needs` says why.
        Raises: HttpError 408, 413 or 429; ClientGone.
        """
        return HeldBody(self, exchange, owner, most, needs)

    async def _read(self, exchange: Exchange, owner: Hashable, most: int | None, needs: str) -> bytes:
        length = exchange.headers.get("content-length", "0")
        self._check(int(length) if length.isdigit() else 0, most, needs)
        if not self._uploads.take(owner, 1):
            raise HttpError(429, "as many of your requests' bodies are on their way as may be: try again", retry_s=1)
        size, parts = 0, []

        def hold(part: bytes) -> None:
            nonlocal size
            self._check(size + len(part), most, needs)
            if not self._held.take(owner, len(part)):
                raise HttpError(429, "your requests hold as much memory as they may: try again", retry_s=1)
            size += len(part)
            parts.append(part)

        try:
            await read_parts(exchange, self._limits, hold)
        except BaseException:
            self._held.give(owner, size)
            raise
        finally:
            self._uploads.give(owner, 1)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _check(self, size: int, most: int | None, needs: str) -> None:
        if most is not None and size > most:
            raise HttpError(413, f"the body is larger than {most:,} bytes, which is {needs}")
        most = self._limits.max_request_bytes
        if size > most:
            raise HttpError(413, f"the body is larger than {most:,} bytes: send less, or raise max_request_bytes")


class HeldBody:
    """What `Bodies.body` gives; a class, since every request has one."""

    __slots__ = ("_bodies", "_exchange", "_most", "_needs", "_owner", "_size")

    def __init__(self, bodies: Bodies, exchange: Exchange, owner: Hashable, most: int | None, needs: str) -> None:
        self._bodies = bodies
        self._exchange = exchange
        self._owner = owner
        self._most, self._needs = most, needs

    async def __aenter__(self) -> bytes:
        body = await self._bodies._read(self._exchange, self._owner, self._most, self._needs)
        self._size = len(body)
        return body

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bodies._held.give(self._owner, self._size)
