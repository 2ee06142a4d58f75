"""How server, store and router serve their apps."""

from typing import Any, cast

import pytest

from hotspan.http.connections import HttpLimits
from hotspan.http.serving import DrainingServer, uvicorn_config


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


async def test_a_server_stops_however_its_draining_ends() -> None:
    """An error while requests end does not keep a server that was told to stop."""

    class Requests:
        def drain(self) -> None:
            pass

        async def drained(self, within_s: float) -> object:
            raise ZeroDivisionError

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    server = DrainingServer(uvicorn_config(app, HttpLimits()), Requests(), 1.0, str)
    with pytest.raises(ZeroDivisionError):
        await server._drain()
    assert server.should_exit
