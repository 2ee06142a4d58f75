"""A noisy neighbour on each thing that tenants share: bodies, connections, the log, names, threads, places, keys.

Each attack is held open, or repeated, while another tenant asks: that must be answered, and hit what it hit before.
"""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from hotspan.bench.prose import prose

from .conftest import ADMIN_TOKEN, KEYS, House
from .wire import connect

pytestmark = pytest.mark.engine

WORDS = 700
LARGEST = 64 << 20
"""The largest body that is taken; the budget of all bodies together is 16 of them."""


@contextlib.contextmanager
def uploads(port: int, head: str, count: int = 40) -> Iterator[None]:
    """Bodies that are announced, begun, and never end."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            peer: socket.socket = stack.enter_context(connect(port))
            peer.sendall(f"{head}Host: localhost\r\nContent-Length: {LARGEST}\r\n\r\n".encode())
            with contextlib.suppress(OSError):  # it may have been refused by now
                peer.sendall(b" " * 65536)
        yield


OPTIONS = "OPTIONS /v1/completions HTTP/1.1\r\nOrigin: http://a\r\nAccess-Control-Request-Method: POST\r\n"
UPLOADS = {
    "health": "POST /health HTTP/1.1\r\n",
    "get health": "GET /health HTTP/1.1\r\n",
    "ping": "POST /ping HTTP/1.1\r\n",
    "preflight": OPTIONS,
    "no key": "POST /v1/completions HTTP/1.1\r\n",
    "nowhere": "POST /nowhere HTTP/1.1\r\n",
    "a tenant": f"POST /v1/completions HTTP/1.1\r\nX-Api-Key: {KEYS['globex']}\r\n",
    "a tenant's get": f"GET /v1/models HTTP/1.1\r\nX-Api-Key: {KEYS['globex']}\r\n",
    "a tenant's invalidation": f"POST /hotspan/cache/invalidate HTTP/1.1\r\nX-Api-Key: {KEYS['globex']}\r\n",
}


@pytest.mark.parametrize("who", UPLOADS)
@pytest.mark.parametrize("entry", ["server", "router"])
def test_slow_uploads_keep_nobody_out(well: House, entry: str, who: str) -> None:
    """While more bytes are announced than the server takes in all, another tenant's largest requests are read."""
    with uploads(well.ports[entry], UPLOADS[who]):
        body = {"model": well.server.model, "prompt": "hello", "max_tokens": 1, "user": "u" * (1 << 20)}
        answer = httpx.post(
            f"http://127.0.0.1:{well.ports[entry]}/v1/completions",
            headers={"x-api-key": KEYS["acme"]},
            json=body,
            timeout=60,
        )
        assert answer.status_code == 200, answer.text[:300]


def test_idle_connections_keep_nobody_out(well: House) -> None:
    """Connections that say nothing take no place that others need."""
    for entry in ("server", "router", "daemon"):
        with contextlib.ExitStack() as stack:
            for _ in range(300):
                stack.enter_context(connect(well.ports[entry]))
            well.is_well()


def test_a_burst_of_invalidations_takes_nothing_from_others(house: House) -> None:
    """150 invalidations of one tenant at once: no other tenant loses a chunk, and each receipt is true.

    All are durable, unless the machine's disk stalled so long that the server gave it up meanwhile. That a burst by
    itself is no stall is shown in simulated time (tests/tiers/test_lower.py).
    """
    text = prose(9200, WORDS)
    house.ask("acme", text)
    before, given_up = house.ask("acme", text), house.given_up
    assert before.cached > 256

    def invalidate(n: int) -> tuple[int, bool]:
        answer = house.call("POST", "/hotspan/cache/invalidate", KEYS["globex"], {"tags": [f"document-{n}"]})
        return answer.status_code, bool(answer.json().get("is_durable"))

    with ThreadPoolExecutor(16) as pool:
        answers = set(pool.map(invalidate, range(150)))
    assert answers == {(200, True)} or (house.given_up > given_up and answers <= {(200, True), (503, False)})
    assert house.ask("acme", text) == before


@pytest.mark.parametrize(
    "scope",
    [
        {"tags": [f"tag-{n}" for n in range(100_000)]},
        {"tokens": [7] * 1_000_000},
        {"prompt": "word " * 1_000_000},
        {"session": "s" * 1_000_000},
        {"tags": ["t" * 1_000_000]},
        {"tokens": [2**31 - 1] * 100},
        {"prompt": "a", "tokens_from": 2**31 - 1},
    ],
    ids=["tags", "tokens", "prompt", "session", "tag", "no tokens of the model", "tokens_from"],
)
def test_what_an_invalidation_may_name_is_bounded(well: House, scope: dict[str, object]) -> None:
    """An invalidation of absurd size is refused, or done; the other tenant is answered meanwhile."""
    text = prose(9210, WORDS)
    well.ask("acme", text)
    before = well.ask("acme", text)
    with ThreadPoolExecutor(1) as pool:
        attack = pool.submit(well.call, "POST", "/hotspan/cache/invalidate", KEYS["globex"], scope)
        assert well.ask("acme", text) == before
        assert attack.result(120).status_code in (200, 400, 413, 422)
    assert well.ask("acme", text) == before


def test_two_tenants_keys_are_destroyed_at_once(house: House) -> None:
    """Shreds side by side, and checks beside them, all end; those of others are untouched."""
    text = prose(9220, WORDS)
    house.ask("acme", text)
    before = house.ask("acme", text)

    def work(path: str) -> int:
        body = {"tenant": "nobody-" + path[-1]} if "shred" in path else None
        return house.call("POST", path.rstrip("0123456789"), ADMIN_TOKEN, body).status_code

    paths = ["/hotspan/keys/shred0", "/hotspan/keys/shred1", "/hotspan/cache/check", "/hotspan/keys/shred2"]
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(work, paths)) <= {200, 404}
    assert house.ask("acme", text) == before


def test_a_flood_of_requests_leaves_a_place_for_others(well: House) -> None:
    """While one tenant has as many requests in work as it can get, another's is answered."""
    body = {"model": well.server.model, "prompt": "go on", "max_tokens": 16, "ignore_eos": True}

    def flood(n: int) -> int:
        return well.call("POST", "/v1/completions", KEYS["globex"], body | {"prompt": f"go on {n}"}).status_code

    with ThreadPoolExecutor(32) as pool:
        asked = [pool.submit(flood, n) for n in range(40)]
        assert well.call("POST", "/v1/completions", KEYS["acme"], body | {"max_tokens": 1}).status_code == 200
        assert {one.result(120) for one in asked} <= {200, 429}


def test_a_tenant_that_fills_the_cache_leaves_the_others_floor(house: House) -> None:
    """A tenant that stores many texts can't push another's out of its floor."""
    text = prose(9230, WORDS)
    house.ask("acme", text)
    assert house.ask("acme", text).cached > 256
    for seed in range(9300, 9316):
        house.ask("globex", prose(seed, WORDS))
    assert house.ask("acme", text).cached > 256
