"""How server, store and router serve their apps."""

from typing import Any, cast

import pytest

from hotspan.http.connections import HttpLimits
from hotspan.http.serving import CUT_S, DrainingServer, uvicorn_config


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


@pytest.mark.parametrize(("drain_s", "within_s"), [(30.0, 30.0 - CUT_S), (float(CUT_S), 0), (1.0, 0)])
async def test_requests_have_all_of_the_time_to_drain_but_its_end(drain_s: float, within_s: float) -> None:
    """The last seconds are for errors and connections; where there are no more than these, requests have none."""
    given = []

    class Requests:
        def drain(self) -> None:
            pass

        async def drained(self, within_s: float) -> object:
            given.append(within_s)
            return None

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    await DrainingServer(uvicorn_config(app, HttpLimits()), Requests(), drain_s, str)._drain()
    assert given == [within_s]
