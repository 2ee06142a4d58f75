"""Who needs no key is asked by this machine's names only, so that no page in a browser can ask in its own name."""

import asyncio
import contextlib
import re
import socket
from pathlib import Path

import pytest

import hotspan.http
from hotspan.core.credentials import key_digest
from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB
from hotspan.daemon.pool import Pool
from hotspan.daemon.routes import Routes
from hotspan.http.errors import HttpError
from hotspan.http.hosts import Hosts
from hotspan.http.options import allowed
from hotspan.server.policy import Gate, access_table
from hotspan.server.principal import Credentials
from hotspan.testing.clock import SimulatedClock
from tests.router.rig import Routed, replicas, routed, say_ok
from tests.server.asgi import call
from tests.server.lmi.fake_engine import FakeEngine
from tests.server.lmi.serving import front
from tests.server.test_policy import fake_app
from tests.server.test_principal import ADMIN_TOKEN, known

from .browser import CHROMIUM, browsing

EVIL = "evil.example"
PATHS = ("/dashboard", "/ping", "/metrics", "/v1/models", "/router/replicas", "/hotspan/cache")


@pytest.mark.parametrize(
    ("host", "is_taken"),
    [
        *((name, True) for name in ("localhost", "LOCALHOST:8080", "a.localhost:1", "127.0.0.1", "127.0.0.1:8080")),
        *((name, True) for name in ("[::1]:8080", "[::1]", "10.0.0.9:80", "given.example", "Given.Example.:8080", "")),
        *((name, False) for name in (EVIL, f"{EVIL}:8080", "localhost.evil.example", "127.0.0.1.evil.example")),
        *((name, False) for name in ("evil.example:localhost", "localhost@evil", "xlocalhost", "[evil]", "a:b")),
    ],
)
def test_names_of_this_machine_are_taken(host: str, is_taken: bool) -> None:
    """Addresses, localhost, this machine's name and those that were given; no other, however it is written."""
    assert Hosts(["given.example"]).takes(host) is is_taken
    assert Hosts().takes(socket.gethostname()) and Hosts(["*"]).takes(host)


async def statuses(at: Routed, host: str) -> set[int]:
    """Of all kinds of the router's routes, for a name."""
    found = set()
    for path in PATHS:
        async with at.client.get(at.url + path, headers={"host": host}) as answer:
            found.add(answer.status)
    drain = {"replica": "http://127.0.0.1:1"}
    return {*found, await at.status(drain, "/router/replicas/drain", headers={"host": host}), await at.status(None)}


async def test_a_router_without_keys() -> None:
    """Other names get 421 on every route; its own names, and those that were given, are answered as ever."""
    async with replicas(say_ok) as fakes:
        async with routed(fakes) as at:
            assert await statuses(at, f"{EVIL}:80") == {421, 200}  # 200 is the one with the client's own address
            assert 421 not in await statuses(at, "localhost:80")
        async with routed(fakes, allowed_hosts=(EVIL,)) as at:
            assert 421 not in await statuses(at, EVIL)


async def test_a_router_with_keys() -> None:
    """A key is asked of whoever comes by any name; what only this machine may ask is still asked by its names."""
    async with replicas(say_ok) as fakes, routed(fakes, keys={key_digest("key"): "a"}) as at:
        for path, status in (("/v1/models", 401), ("/router/replicas", 421), ("/metrics", 421)):
            async with at.client.get(at.url + path, headers={"host": EVIL}) as answer:
                assert answer.status == status


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_a_server_without_keys(kind: str) -> None:
    """Every route, websockets too, is refused to other names before anything is read of the request."""
    engine = FakeEngine()
    table = access_table(has_keys=False, has_given_token=False)
    app = Gate(front(engine), table, Credentials(known(), ADMIN_TOKEN), hosts=Hosts())
    for path in ("/v1/completions", "/ping", "/metrics", "/dashboard", "/hotspan/cache", "/nowhere"):
        refused = call(app, "POST", path, {"host": EVIL, "authorization": f"Bearer {ADMIN_TOKEN}"}, {}, kind)
        assert refused.status == (421 if kind == "http" else 403)
    assert not engine.seen and call(app, "GET", "/ping", {"host": "localhost:8080"}).status == 200


# -- pages of other sites ------------------------------------------------------------------------------------------

PAGE = f"https://{EVIL}"
FORM = "text/plain;charset=UTF-8"


@pytest.mark.parametrize(
    ("origin", "is_taken"),
    [
        *(
            (name, True)
            for name in ("http://localhost:3000", "http://127.0.0.1", "http://[::1]:8", "https://a.localhost")
        ),
        *((name, True) for name in ("https://given.example", "http://HERE.example:8080", "http://10.0.0.9:8000", "")),
        *((name, False) for name in (PAGE, f"{PAGE}:8080", "null", "http://10.0.0.8", "http://[2001:db8::1]", "x")),
        *((name, False) for name in ("http://127.0.0.1.evil.example", "http://[::1", "https://localhost@evil.example")),
    ],
)
def test_pages_of_this_machine_are_taken(origin: str, is_taken: bool) -> None:
    """A page may open a websocket, or post without being asked first, if its site is this server or this machine, or
    has a name that was given; an address alone is none, since any site can have one."""
    hosts, headers = Hosts(["given.example", "here.example"]), {"host": "10.0.0.9:8000", "origin": origin}
    for method in (None, "POST"):
        with contextlib.nullcontext() if is_taken else pytest.raises(HttpError, match="this machine's pages"):
            hosts.check(method, headers | {"content-type": FORM})
    hosts.check("GET", headers)
    for method in ("POST", "PUT", "DELETE"):  # the browser asked before (CORS)
        hosts.check(method, headers | {"content-type": "application/json; charset=utf-8"})
    hosts.check("DELETE", headers)
    for allowing in (Hosts(["*"]), Hosts(origins=[PAGE, origin]), Hosts(origins=["*"])):
        allowing.check(None, headers)


def test_a_page_of_the_proxy_in_front_is_taken() -> None:
    """A proxy names the host that was asked, and sends its own; no page can say so without having asked first."""
    hosts, page = Hosts(), {"origin": "https://llm.corp.example", "content-type": "multipart/form-data; boundary=x"}
    for method in (None, "POST"):
        for said in ("llm.corp.example", "LLM.corp.example:443, proxy.example"):
            hosts.check(method, page | {"host": "127.0.0.1:8080", "x-forwarded-host": said})
        with pytest.raises(HttpError):
            hosts.check(method, page | {"host": "127.0.0.1:8080", "x-forwarded-host": "other.example"})


@pytest.mark.parametrize("allowed_origins", ["[1]", [None], "{"])
def test_origins_that_are_no_text_are_a_clear_error(allowed_origins: object) -> None:
    with pytest.raises(ConfigError, match="give a JSON list of text"):
        allowed({"allowed_origins": allowed_origins}, "origins")


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/models"])
def test_a_page_of_another_site_opens_no_websocket(path: str) -> None:
    """Neither at an address nor at a name of a server without keys; with keys a key is asked, which no page has."""
    table = access_table(has_keys=False, has_given_token=False)
    for host in ("127.0.0.1:8000", "localhost:8000", "10.0.0.9"):
        app = Gate(fake_app(), table, Credentials(known(), ADMIN_TOKEN), hosts=Hosts())
        assert call(app, "GET", path, {"host": host, "origin": PAGE}, kind="websocket").status == 403
        assert call(app, "GET", "/v1/realtime", {"host": host}, kind="websocket").status == 101
        own = {"host": host, "origin": f"http://{host}"}
        assert call(app, "GET", "/v1/realtime", own, kind="websocket").status == 101


@pytest.mark.parametrize("kind", [FORM, "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", ""])
async def test_a_page_of_another_site_posts_nothing_without_asking_first(kind: str) -> None:
    """As forms do, to a server, a router or a daemon without keys: nothing is computed, drained or leased."""
    engine, headers = FakeEngine(), {"origin": PAGE, "content-type": kind, "host": "127.0.0.1"}
    app = Gate(
        front(engine),
        access_table(has_keys=False, has_given_token=False),
        Credentials(known(), ADMIN_TOKEN),
        hosts=Hosts(),
    )
    daemon = Routes(Pool(memoryview(bytearray(MIB)), 4096, SimulatedClock()), b"12345678", "/socket", dict, bytes)

    def ask() -> list[int]:
        paths = ("/invocations", "/v1/audio/transcriptions", "/v1/completions", "/v1/responses/resp_1/cancel")
        found = [call(app, "POST", path, headers, {"inputs": "x"}).status for path in paths]
        return [*found, call(daemon, "POST", "/v1/kv/bucket/key/leases", headers).status]

    assert await asyncio.to_thread(ask) == [403] * 5 and not engine.seen
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        for path in ("/v1/completions", "/v1/audio/transcriptions", "/hotspan/cache/clear", "/router/replicas/drain"):
            assert await at.status(path=path, headers=headers) == 403
        assert not fake.works


SERVED = {
    "router/run.py": "Gateway: Access.check_host",
    "server/run.py": "Entrance.gate",
    "server/models/run.py": "Entrance.gate",
    "server/loading.py": "503 without data",
    "daemon/server.py": "daemon/routes.py: Routes._check, at both ports",
    "daemon/unix_server.py": "no HTTP",
    "server/control.py": "opens sockets; control_serving.py answers there",
    "server/control_serving.py": "by TCP the admin token is asked, which no page has; no browser reaches a Unix socket",
}
"""Modules that serve HTTP, and who checks names there."""


def test_whoever_serves_http_checks_names() -> None:
    """A module that begins to serve HTTP is added to the table above, with what checks names there."""
    root = Path(hotspan.http.__file__).parents[1]
    serves = re.compile(r"(?<!def )\b(uvicorn_config|listen|start_server)\(")
    files = [path for path in root.rglob("*.py") if path.name != "serving.py"]
    found = {path.relative_to(root).as_posix() for path in files if serves.search(path.read_text())}
    assert found == set(SERVED)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
async def test_a_page_with_a_rebound_name_reaches_nothing(tmp_path: Path) -> None:
    """In a browser for which a strange name leads here, that name's page reads nothing and drains nothing."""
    async with replicas(say_ok) as (fake,), routed([fake]) as at:
        port = at.url.rpartition(":")[2]
        rules = f"--host-resolver-rules=MAP {EVIL} 127.0.0.1"
        async with browsing(f"http://{EVIL}:{port}/dashboard", tmp_path / "profile", rules) as tab:
            assert await tab.run("location.hostname") == EVIL
            drain = f"""fetch('/router/replicas/drain', {{method: 'POST', body: '{{"replica": "{fake.url}"}}',
                headers: {{'content-type': 'application/json'}}}}).then(answer => answer.status)"""
            assert await tab.run("fetch('/router/replicas').then(answer => answer.status)") == 421
            assert await tab.run(drain) == 421 and fake.url in at.router.fleet.up
            await tab.send("Page.navigate", url=f"http://127.0.0.1:{port}/dashboard")
            await tab.until("location.hostname === '127.0.0.1' && document.readyState === 'complete'")
            assert await tab.run("fetch('/router/replicas').then(answer => answer.status)") == 200
