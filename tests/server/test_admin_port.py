"""A port of its own for administration: what each port serves, to whom; and both ports over TLS."""

import contextlib
import http.client
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.http.connections import HttpLimits, connection_class
from hotspan.http.options import tls_options
from hotspan.http.paths import ADAPTER_WRITES, EXPLAIN, LOOKUP, PIN, PREFETCH, WARM, WARM_UP
from hotspan.http.serving import bind
from hotspan.server.loading import answering_while_loading
from hotspan.server.options import bind_admin
from hotspan.server.policy import ADMIN, CLIENT, PUBLIC, SHARED, Access, Gate, access_table
from hotspan.server.principal import Credentials
from tests.certificates import make_certificate
from tests.server.conftest import serve_options

from .asgi import call
from .test_policy import OF_ACME, OF_ADMIN, fake_app
from .test_principal import ADMIN_TOKEN, known


@contextlib.contextmanager
def serving(gate: Gate, *sockets: socket.socket, **options: Any) -> Iterator[None]:
    """uvicorn over these sockets as a server runs it, in a thread."""
    http = connection_class(HttpLimits())
    server = uvicorn.Server(uvicorn.Config(gate, http=http, log_config=None, lifespan="off", **options))
    thread = threading.Thread(target=server.run, args=(list(sockets),), daemon=True)
    thread.start()
    deadline = time.monotonic() + 60
    while not server.started:
        assert time.monotonic() < deadline, "uvicorn did not come up"
        time.sleep(0.005)
    try:
        yield
    finally:
        server.should_exit = True
        thread.join(60)


PORT, ADMIN_PORT = 8080, 8081
Status = Callable[..., int]


@pytest.fixture(params=[True, False], ids=["keyed", "open"])
def is_keyed(request: pytest.FixtureRequest) -> bool:
    """Whether clients need keys."""
    return bool(request.param)


@pytest.fixture
def status(is_keyed: bool) -> Status:
    """What a request to a port is answered with."""
    app = fake_app()

    async def answer() -> dict[str, str]:
        return {}

    for path in ("/hotspan/cache", "/hotspan/cache/invalidate", "/adapters"):
        app.add_api_route(path, answer, methods=["GET", "POST"], include_in_schema=False)
    table = access_table(has_keys=is_keyed, has_given_token=True)
    gate = Gate(app, table, Credentials(known(acme="key-a") if is_keyed else Tenants(), ADMIN_TOKEN), ADMIN_PORT)
    return lambda port, path, headers, method="GET": call(gate, method, path, headers, port=port).status


def test_each_port_serves_its_own(status: Status) -> None:
    """Clients' routes are refused at the administrator's port and administration at the clients', token or not."""
    for path in ("/sleep", "/metrics", "/hotspan/cache", "/new/route"):
        assert {status(PORT, path, who) for who in ({}, OF_ACME, OF_ADMIN)} == {403}, path
        assert status(ADMIN_PORT, path, OF_ADMIN) == 200, path
        assert status(ADMIN_PORT, path, {}) == 401, path
    assert {status(port, "/nothing", who) for port in (PORT, ADMIN_PORT) for who in ({}, OF_ACME, OF_ADMIN)} == {404}
    for path in ("/v1/completions", "/v1/models"):
        assert {status(ADMIN_PORT, path, who) for who in ({}, OF_ACME, OF_ADMIN)} == {403}, path
        assert status(PORT, path, OF_ADMIN) == 200, path


def test_a_client_administers_nothing_at_either_port(status: Status, is_keyed: bool) -> None:
    """A client's key (or none, where none is needed) opens nothing at the administrator's port but what is public."""
    for path in ("/sleep", "/hotspan/cache/invalidate", "/adapters"):
        assert status(ADMIN_PORT, path, OF_ACME) == (403 if is_keyed else 401), path
    assert status(PORT, "/hotspan/cache/invalidate", OF_ACME, "POST") == 200
    assert status(ADMIN_PORT, "/hotspan/cache/invalidate", OF_ADMIN, "POST") == 200
    assert status(ADMIN_PORT, "/adapters", OF_ADMIN) == 200
    assert status(PORT, "/adapters", OF_ADMIN, "POST") == 403, "registering an adapter is administration"
    assert [status(each, "/health", {}) for each in (PORT, ADMIN_PORT)] == [200, 200]


def test_the_host_header_does_not_choose_the_port(status: Status) -> None:
    """What a request says of the server that it means changes nothing."""
    lies = {"host": f"127.0.0.1:{ADMIN_PORT}", "x-forwarded-port": str(ADMIN_PORT), "x-forwarded-host": "admin"}
    assert status(PORT, "/sleep", OF_ADMIN | lies) == 403


@pytest.mark.parametrize("has_client_adapters", [False, True])
def test_every_route_has_a_port(has_client_adapters: bool) -> None:
    """Of the whole table, each route is served at one port at least, and only the public and the shared at both."""
    table = access_table(has_keys=True, has_given_token=True, has_client_adapters=has_client_adapters)
    served = {
        name: (access is not Access.ADMIN, access is not Access.CLIENT or name in SHARED)
        for name, access in table.items()
    }
    assert all(any(at) for at in served.values())
    both = {name for name, at in served.items() if all(at)}
    administrators = {*ADMIN} - ({*ADAPTER_WRITES} if has_client_adapters else set())
    assert both == {*PUBLIC, *SHARED} - administrators and {*CLIENT} & both == {
        "/hotspan/cache/invalidate",
        PREFETCH,
        LOOKUP,
        PIN,
        EXPLAIN,
        WARM,
        WARM_UP,
    }


def test_one_port_for_both_is_refused() -> None:
    """Requests are told apart by their port: one for both, or one that is taken, is an error that names its option."""
    with contextlib.closing(bind("127.0.0.1", 0)) as listener, contextlib.closing(bind("127.0.0.1", 0)) as taken:
        taken.listen()
        port = listener.getsockname()[1]
        options = serve_options(admin_port=port, admin_host="127.0.0.2")
        with pytest.raises(ConfigError, match=f"--admin-port {port} is the clients' --port"):
            bind_admin(options, listener)
        options = serve_options(admin_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="give another --admin-port"):
            bind_admin(options, listener)
        assert bind_admin(serve_options(), listener) is None


@pytest.fixture
def tls(tmp_path: Path) -> tuple[dict[str, Any], ssl.SSLContext]:
    """uvicorn's options as vLLM's would give them, and what a client trusts."""
    pair = make_certificate(tmp_path)
    values = {"ssl_certfile": str(pair.certificate), "ssl_keyfile": str(pair.key), "ssl_cert_reqs": "0"}
    return tls_options(values), ssl.create_default_context(cafile=str(pair.certificate))


def test_both_ports_speak_tls(tls: tuple[dict[str, Any], ssl.SSLContext]) -> None:
    """With a certificate, both ports answer over TLS, each its own, and to nothing else."""
    options, trusted = tls
    table = access_table(has_keys=False, has_given_token=True)
    with contextlib.closing(bind("127.0.0.1", 0)) as listener, contextlib.closing(bind("127.0.0.1", 0)) as admin:
        port, admin_port = listener.getsockname()[1], admin.getsockname()[1]
        gate = Gate(fake_app(), table, Credentials(Tenants(), ADMIN_TOKEN), admin_port)
        with serving(gate, listener, admin, **options):
            found = []
            for at in (port, admin_port):
                connection = http.client.HTTPSConnection("127.0.0.1", at, timeout=60, context=trusted)
                with contextlib.closing(connection):
                    connection.request("GET", "/sleep", headers=OF_ADMIN)
                    found.append(connection.getresponse().status)
            assert found == [403, 200]
            with pytest.raises((http.client.HTTPException, OSError)):
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
                connection.request("GET", "/health")
                connection.getresponse()


def test_loading_speaks_tls(tls: tuple[dict[str, Any], ssl.SSLContext]) -> None:
    """A client with TLS reads that the model is loading."""
    options, trusted = tls
    with contextlib.closing(bind("127.0.0.1", 0)) as listener, answering_while_loading(listener, options):
        port = listener.getsockname()[1]
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trusted)
        with contextlib.closing(connection):
            connection.request("GET", "/ping")
            answer = connection.getresponse()
            assert answer.status == 503 and json.loads(answer.read()) == {"status": "Loading"}
