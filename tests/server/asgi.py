"""One request to an ASGI app, without a server: what it was sent, and what the app saw."""

import asyncio
import json
from dataclasses import dataclass
from typing import Any


@dataclass
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def sent_by(
    app: Any,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: bytes = b"",
    kind: str = "http",
    port: int = 8080,
) -> list[dict[str, Any]]:
    """The messages that `app` sends in response to a request at a port."""
    given = {"host": "h", "content-type": "application/json"} | (headers or {})
    scope = {
        "type": kind,
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in given.items()],
        "scheme": kind.replace("websocket", "ws"),
        "server": ("127.0.0.1", port),
        "client": ("127.0.0.1", 9),
        "state": {},
    }
    if kind == "websocket":
        del scope["method"]
    sent: list[dict[str, Any]] = []
    first = {"type": "http.request", "body": body, "more_body": False}
    coming = [{"type": "websocket.connect"} if kind == "websocket" else first]

    async def receive() -> dict[str, Any]:
        if coming:
            return coming.pop()
        return await asyncio.get_running_loop().create_future()  # the client stays

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent


def call(
    app: Any,
    method: str,
    path: str,
    headers: dict[str, str] | None = None,
    body: Any = None,
    kind: str = "http",
    port: int = 8080,
) -> Reply:
    """The reply of `app`; a websocket that was closed before it opened has status 403."""
    sent = sent_by(app, method, path, headers, b"" if body is None else json.dumps(body).encode(), kind, port)
    if sent and sent[0]["type"].startswith("websocket."):
        return Reply(101 if sent[0]["type"] == "websocket.accept" else 403, {}, b"")
    start = sent[0]
    return Reply(
        start["status"],
        {name.decode().lower(): value.decode() for name, value in start["headers"]},
        b"".join(message.get("body", b"") for message in sent[1:]),
    )
