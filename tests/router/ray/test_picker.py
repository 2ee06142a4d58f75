"""What HAProxy asks the picker: bodies are bounded, since any client's are handed over."""

from typing import Any

import pytest

pytest.importorskip("ray")

from hotspan.router.ray.picker import Picker

PART = bytes(1 << 20)


class Asking:
    """A request of so many parts of 1 MiB, and what was answered."""

    def __init__(self, parts: int) -> None:
        self.left = parts
        self.sent: list[dict[str, Any]] = []

    async def receive(self) -> dict[str, Any]:
        self.left -= 1
        return {"type": "http.request", "body": PART, "more_body": self.left > 0}

    async def send(self, message: Any) -> None:
        self.sent.append(message)


async def test_a_body_has_an_end() -> None:
    """A body beyond the limit is refused before it is read to its end, and nothing of it is held."""
    picker = Picker(None, None)  # type: ignore[arg-type]
    asking = Asking(1000)
    scope = {"type": "http", "method": "POST", "path": "/internal/route", "query_string": b"", "headers": []}
    await picker(scope, asking.receive, asking.send)
    assert asking.sent[0]["status"] == 413 and asking.left > 900
    assert picker._bodies._held.used == 0
