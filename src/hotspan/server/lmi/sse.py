"""Server-sent events, as the engine writes them."""

import json
from collections.abc import AsyncIterator
from typing import Any

_DONE = b"[DONE]"


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each event of a stream, however its bytes were cut; comments and the closing [DONE] are left out."""
    rest = b""
    async for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if data and data != _DONE:
                yield json.loads(data)


def event(data: bytes) -> bytes:
    """One event; what has several lines stays one."""
    return b"".join(b"data: %b\n" % line for line in data.splitlines() or [b""]) + b"\n"
