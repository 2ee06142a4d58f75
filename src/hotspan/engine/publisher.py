"""vLLM's publisher of KV events, for followers with the key only, and on loopback where that is asked.

scheduler -> connector -> offer_publisher -> EventPublisherFactory -> KeyedPublisher
"""

from functools import partial
from pathlib import Path
from typing import Any

import zmq
from vllm.distributed.kv_events import EventPublisherFactory, ZmqEventPublisher
from zmq.auth.thread import ThreadAuthenticator

from hotspan.config.kv_events import is_local, read_key
from hotspan.core.curve import DOMAIN, CurveKeys


def offer_publisher(key: Path | None) -> None:
    """Have engines of this process publish by ours. key: a file (config/kv_events.py); None sends to whoever follows.

    Raises: ConfigError for a key that can't be used.
    """
    made = partial(KeyedPublisher, None if key is None else read_key(key))
    EventPublisherFactory._registry["zmq"] = made  # `register_publisher` takes new names only, and the config none


class KeyedPublisher(ZmqEventPublisher):
    """Publishes to followers that show the key; without `keys` as vLLM does, but for loopback addresses."""

    def __init__(self, keys: CurveKeys | None, *given: Any, **named: Any) -> None:
        self._keys = keys
        self._gate: ThreadAuthenticator | None = None
        super().__init__(*given, **named)

    def shutdown(self) -> None:
        super().shutdown()
        if self._gate is not None:
            self._gate.stop()
            self._ctx.destroy(0)
            self._gate = None

    def _socket_setup(self) -> None:
        if self._keys is None and not is_local(self._endpoint):
            super()._socket_setup()
            return
        if self._keys is not None:
            # A context of its own: whoever asks to follow is asked for in it, and vLLM's other sockets are not.
            self._ctx = zmq.Context()
            self._gate = ThreadAuthenticator(self._ctx)
            self._gate.start()
            self._gate.configure_curve_callback(DOMAIN.decode(), self._keys)
        self._pub = self._socket(zmq.PUB)
        self._pub.set_hwm(self._hwm)
        if is_local(self._endpoint) or "*" in self._endpoint or "::" in self._endpoint:
            self._pub.bind(self._endpoint)
        else:
            self._pub.connect(self._endpoint)
        if self._replay_endpoint is not None:
            self._replay = self._socket(zmq.ROUTER)
            self._replay.bind(self._replay_endpoint)

    def _socket(self, kind: int) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = self._ctx.socket(kind)
        if self._keys is not None:
            self._keys.publish(socket)
        return socket
