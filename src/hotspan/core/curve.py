"""Keys of ZeroMQ's CURVE, all made of one secret: who has it may publish KV events and follow them, nobody else.

secret -> publisher's key pair     a follower knows the public half, and believes no other publisher
       -> followers' key pair      a publisher knows the public half, and sends to nobody else
"""

import hmac
from dataclasses import dataclass, field

import zmq
import zmq.asyncio
from zmq.utils import z85

from hotspan.core.errors import ConfigError

DOMAIN = b"hotspan-kv-events"
LEAST_SECRET = 32
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
