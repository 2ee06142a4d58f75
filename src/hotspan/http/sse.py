"""Server-sent events, as vLLM writes them."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

from hotspan.http.errors import HttpError

SSE = "text/event-stream"
_DATA, _DONE = b"data:", b"[DONE]"


class Events:
    """Reads a stream part by part, however its bytes are cut."""

    def __init__(self) -> None:
        self._rest = b""

    def of(self, part: bytes) -> Iterator[Any]:
        """The JSON of each event that ends in this part, without comments and the closing [DONE]."""
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            if (data := _data(line)) and data != _DONE:
                yield json.loads(data)


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[Any]:
    """The JSON of each event of a stream."""
    reader = Events()
    async for part in parts:
        for found in reader.of(part):
            yield found


def event(data: bytes) -> bytes:
    """One event, also of several lines."""
    return b"".join(b"data: %b\n" % line for line in data.splitlines() or [b""]) + b"\n"


def first_error(content: bytes) -> HttpError | None:
    """The error that a stream begins with, if it begins with one."""
    data = _data(content.partition(b"\n")[0])
    if not data.startswith(b'{"error"'):
        return None
    try:
        return HttpError.in_stream(json.loads(data))
    except ValueError:
        return None  # no whole event yet


def _data(line: bytes) -> bytes:
    return line.removeprefix(_DATA).strip() if line.startswith(_DATA) else b""
