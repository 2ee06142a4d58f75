"""The sockets that servers listen at."""

import asyncio
import socket

import pytest

from hotspan.core.errors import ConfigError
from hotspan.http.serving import bind


async def test_connections_send_at_once() -> None:
    """What asyncio accepts there has TCP_NODELAY: a head and what follows it do not wait for an acknowledgement."""
    accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        writer.close()

    async with await asyncio.start_server(serve, sock=(listener := bind("127.0.0.1", 0))):
        with socket.create_connection(listener.getsockname()):
            assert await asyncio.wait_for(accepted, 60) == 1


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
