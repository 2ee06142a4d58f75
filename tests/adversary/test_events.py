"""Who connects to the ports of KV events without the key: nothing is told, neither what happens nor what happened."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import zmq

from hotspan.bench.prose import prose
from hotspan.config.kv_events import DOMAIN, CurveKeys
from tests.router.test_event_keys import eavesdropper

from .conftest import EVENTS_KEY, House
from .wire import HANG_S, answered

pytestmark = pytest.mark.engine

GREETING_BYTES = 64
"""What a ZeroMQ socket says first, to anybody."""

OURS = CurveKeys.of(EVENTS_KEY.encode())


def strangers() -> dict[str, dict[str, object]]:
    """Options of sockets that lack the key, or a part of it."""
    public, secret = zmq.curve_keypair()
    own = {"CURVE_PUBLICKEY": public, "CURVE_SECRETKEY": secret, "ZAP_DOMAIN": DOMAIN}
    guess = CurveKeys.of(EVENTS_KEY[:-1].encode())
    guessed = {"CURVE_PUBLICKEY": guess.follower, "CURVE_SECRETKEY": guess.follower_secret}
    return {
        "no key": {},
        "a password": {"PLAIN_USERNAME": b"router", "PLAIN_PASSWORD": EVENTS_KEY.encode()},
        "a pair of its own": own | {"CURVE_SERVERKEY": OURS.publisher},
        "a guess": guessed | {"CURVE_SERVERKEY": guess.publisher},
        "the follower's public half": own | {"CURVE_SERVERKEY": OURS.follower},
    }


@contextlib.contextmanager
def router(port: int, kind: int) -> Iterator["zmq.Socket[bytes]"]:
    """Who has the key."""
    keys = {"CURVE_SERVERKEY": OURS.publisher, "CURVE_PUBLICKEY": OURS.follower}
    with eavesdropper(port, kind, CURVE_SECRETKEY=OURS.follower_secret, **keys) as socket:
        yield socket


@pytest.mark.parametrize("who", strangers())
def test_without_the_key_nothing_is_told(well: House, who: str) -> None:
    """What a tenant's request stores is told to who has the key, and to nobody else, live or replayed."""
    live, replay = well.event_ports
    options = strangers()[who]
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(eavesdropper(live, zmq.SUB, **options))
        asks = stack.enter_context(eavesdropper(replay, zmq.DEALER, **options))
        refusals = [one.get_monitor_socket() for one in (deaf, asks)]
        with contextlib.suppress(zmq.Again):  # refused already: it can't even ask
            asks.send_multipart([b"", (0).to_bytes(8, "big")], zmq.NOBLOCK)
        assert all(refusal.poll(HANG_S * 1000) for refusal in refusals), "both connections are refused"
        with router(live, zmq.SUB) as hears, router(replay, zmq.DEALER) as sees:
            sees.send_multipart([b"", (0).to_bytes(8, "big")])
            assert sees.poll(HANG_S * 1000), "who has the key is answered"
            seeds = itertools.count(20_000 + 1000 * sorted(strangers()).index(who))
            while not hears.poll(500):  # its subscription may come after the first
                well.ask("acme", prose(next(seeds), 300))
        assert not deaf.poll(0) and not asks.poll(0)


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", b"\xff" + bytes(63), b"\x00" * 4096])
def test_other_protocols_get_no_event(well: House, sent: bytes) -> None:
    """Who speaks no ZeroMQ gets a greeting at most, and the ports serve on."""
    for port in well.event_ports:
        assert len(answered(port, sent, half_close=True)) <= GREETING_BYTES
