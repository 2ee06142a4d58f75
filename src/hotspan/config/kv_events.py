"""Where an engine publishes its KV events, and who can follow them there.

Events hold the tokens of every tenant's texts and the salts that keep tenants apart. They are for routers only. The key
of KV events is one secret, of which the keys of ZeroMQ's CURVE are made:

    secret -> publisher's key pair     a follower knows the public half, and accepts no other publisher
           -> followers' key pair      a publisher knows the public half, and sends to nobody else
"""

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio
from zmq.utils import z85

from hotspan.config.secrets import is_token, read_private
from hotspan.core.addresses import is_loopback
from hotspan.core.errors import ConfigError

OPTION = "kv_events_config"
"""vLLM's, by its name; JSON."""

FLAG = "--kv-events-key"
LOCAL_ENDPOINT = "tcp://127.0.0.1:5557"
"""Where events are published if nobody says where. vLLM's own default is every address of the machine."""

DOMAIN = b"hotspan-kv-events"
_MIN_SECRET = 32
"""Characters."""


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Both ends' keys, as ZeroMQ takes them (Z85)."""

    publisher: bytes
    publisher_secret: bytes = field(repr=False)
    follower: bytes
    follower_secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: bytes) -> "CurveKeys":
        """Those that a secret makes. Raises: ConfigError where this ZeroMQ has no CURVE."""
        if not zmq.has("curve"):
            raise ConfigError("this build of pyzmq has no CURVE, which --kv-events-key needs: install one from PyPI")
        ends = (z85.encode(hmac.digest(secret, DOMAIN + end, "sha256")) for end in (b" publisher", b" follower"))
        publisher, follower = ends
        return cls(zmq.curve_public(publisher), publisher, zmq.curve_public(follower), follower)

    def publish(self, socket: zmq.SyncSocket) -> None:
        """Make a socket, not yet bound, a publisher's."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.publisher_secret)
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)

    def follow(self, socket: zmq.SyncSocket | zmq.asyncio.Socket) -> None:
        """Make a socket, not yet connected, a follower's."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.publisher)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.follower)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.follower_secret)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a publisher lets somebody follow who has shown to hold the secret half of `key`; zmq.auth asks."""
        return domain.encode() == DOMAIN and hmac.compare_digest(key, self.follower)


@dataclass(frozen=True, slots=True)
class Published:
    """What an option of vLLM's publishes.

    endpoint: None is the default. replay: None has none.
    """

    config: Mapping[str, Any]
    endpoint: str | None
    replay: str | None

    @property
    def open_addresses(self) -> tuple[str, ...]:
        """Addresses that other machines may reach."""
        return tuple(each for each in (self.endpoint, self.replay) if each is not None and not is_local(each))


def published(engine_values: Mapping[str, Any]) -> Published | None:
    """What the engine's options, as they were written, publish; None is nothing, also for what vLLM will refuse."""
    given = engine_values.get(OPTION)
    try:
        config = json.loads(given) if isinstance(given, str) else None
    except ValueError:
        return None
    if not isinstance(config, dict) or not _is_on(config.get("enable_kv_cache_events", False)):
        return None
    if config.get("publisher") == "null":
        return None
    endpoint, replay = config.get("endpoint"), config.get("replay_endpoint")
    return Published(config, None if endpoint is None else str(endpoint), None if replay is None else str(replay))


def _is_on(value: object) -> bool:
    """Whether vLLM could take it for true: it also takes numbers and words."""
    return str(value).strip().lower() not in ("false", "0", "0.0", "no", "off", "f", "n")


def is_local(endpoint: str) -> bool:
    """Whether only this machine reaches a ZeroMQ address."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return True
    return is_loopback(endpoint.partition("://")[2].rpartition(":")[0])


def read_key(file: Path) -> CurveKeys:
    """The keys that a file's secret makes. Raises: ConfigError for one that others can read, or that can be guessed."""
    secret = read_private(file, "the key of KV events").strip()
    if len(secret) < _MIN_SECRET or not is_token(secret):
        raise ConfigError(
            f"{FLAG} {file} holds too short a key, or one with spaces: give at least {_MIN_SECRET} visible ASCII "
            "characters (openssl rand -hex 32), the same for replicas and router"
        )
    return CurveKeys.of(secret.encode())
