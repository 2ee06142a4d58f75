"""The sockets that servers listen at."""

import asyncio
import logging
import socket
from typing import Any

import pytest
from uvicorn.server import ServerState

from hotspan.core.errors import ConfigError
from hotspan.http.connections import HttpLimits
from hotspan.http.serving import bind, listen


async def test_connections_send_at_once() -> None:
    """What asyncio accepts there has TCP_NODELAY: a head and what follows it do not wait for an acknowledgement."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(serve, sock=(listener := bind("127.0.0.1", 0))):
        with socket.create_connection(listener.getsockname()):
            assert await asyncio.wait_for(accepted, 60) == 1


async def test_a_program_that_is_served_in_keeps_its_loggers(caplog: pytest.LogCaptureFixture) -> None:
    """Those of uvicorn's may be its own server's: their levels and handlers stay, and no request is a line there."""
    loggers = [logging.getLogger(name) for name in ("uvicorn", "uvicorn.access", "uvicorn.error", "uvicorn.asgi")]

    def shown() -> list[Any]:
        return [(each.level, [*each.handlers], each.propagate, each.disabled) for each in loggers]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    before = shown()
    caplog.set_level(logging.INFO)
    async with await listen(app, HttpLimits(), listener := bind("127.0.0.1", 0), ServerState()):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
        assert (await asyncio.wait_for(reader.read(), 60)).startswith(b"HTTP/1.1 204")
        writer.close()
    assert shown() == before
    assert not [record for record in caplog.records if record.name == "uvicorn.access"]


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("127.0.0.1", 65536, "--admin-port 65536 is no port"),
        ("192.0.2.1", 0, "is no address of this machine: give another --admin-host"),
        ("not a name", 0, "give another --admin-host"),
    ],
)
def test_an_address_that_cannot_be_had(host: str, port: int, said: str) -> None:
    """The error names the option that its role gives it."""
    with pytest.raises(ConfigError, match=said):
        bind(host, port, "admin-")


def test_a_port_that_is_taken() -> None:
    """Somebody listens there already."""
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="is taken by another"):
        bind(*other.getsockname())
