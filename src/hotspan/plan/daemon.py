"""Whether this node has a daemon that can be an L2: hotspan's own, or HyperPod's."""

import http.client
import json
import socket
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.l2.open import DAEMON_PORT
from hotspan.l2.options import SEGMENT_NAME

_MOST_ANSWER = 65536


class Answerer(Enum):
    """Who answers."""

    HOTSPAN = "hotspan daemon"
    HYPERPOD = "HyperPod's daemon"
    STRANGER = "something else"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Daemon:
    """What was found at an address; `url` is what --l2 takes, None where there is no L2."""

    who: Answerer
    address: str
    url: str | None


def find_daemon(
    host: str = "127.0.0.1",
    port: int = DAEMON_PORT,
    timeout_s: float = 0.5,
    segment: Path = SHARED_MEMORY / SEGMENT_NAME,
) -> Daemon:
    """Who answers there. Never raises for what the network does.

    hotspan's daemon says its name at GET /health. HyperPod's has no such path: it is taken for one where a connection
    is accepted and its shared memory, through which all is read, is there. (9200 is Elasticsearch's port, too.)
    Blocks: `timeout_s` for each of both steps.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = f"sagemaker-hyperpod://{address}"
    if _is_own(host, port, timeout_s):
        return Daemon(Answerer.HOTSPAN, address, url)
    try:
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, OverflowError, UnicodeError):
        return Daemon(Answerer.NOBODY, address, None)
    if segment.is_file():
        return Daemon(Answerer.HYPERPOD, address, url)
    return Daemon(Answerer.STRANGER, address, None)


def _is_own(host: str, port: int, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        answer = json.loads(response.read(_MOST_ANSWER)) if response.status == 200 else None
    except (OSError, OverflowError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return isinstance(answer, dict) and answer.get("service") == "hotspan-daemon"
