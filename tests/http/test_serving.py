"""How server, store and router serve their apps."""

from typing import Any, cast

from hotspan.http.connections import HttpLimits
from hotspan.http.serving import uvicorn_config


async def test_forwarded_headers_name_nobody() -> None:
    """A client on loopback, which uvicorn would trust, changes neither its address nor the scheme by headers."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope["client"], scope["scheme"]))

    config = uvicorn_config(app, HttpLimits())
    config.load()
    headers = [(b"x-forwarded-for", b"203.0.113.9"), (b"x-forwarded-proto", b"https")]
    scope = {"type": "http", "scheme": "http", "client": ("127.0.0.1", 9), "headers": headers}
    await cast(Any, config.loaded_app)(scope, None, None)
    assert seen == [(("127.0.0.1", 9), "http")]
