"""Who answers a path: the best replica, any one, all of them, or the router itself."""

import re
from enum import Enum

OWN = "/router"
REPLICAS, DRAIN, RESUME = f"{OWN}/replicas", f"{OWN}/replicas/drain", f"{OWN}/replicas/resume"
"""GET lists the replicas. POST {"replica": URL} takes one out of service, or back."""


class Route(Enum):
    """How a request is answered.

    WORK:  by the best replica. ONE: by any replica. ALL: by every replica. The others by the router.
    """

    WORK = "work"
    ONE = "one"
    ALL = "all"
    HEALTH = "health"
    METRICS = "metrics"
    ADMIN = "admin"


_WORK = frozenset(
    (
        *("/invocations", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"),
        *("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score"),
        *("/rerank", "/v1/rerank", "/v2/rerank", "/generative_scoring", "/cohere/v2/chat", "/v1/systemone"),
        *("/v1/chat/completions/batch", "/v1/audio/transcriptions", "/v1/audio/translations", "/inference/v1/generate"),
    )
)
_BY_NAME = re.compile(r"/predictions/[^/]+|/models/[^/]+/invoke")
_STATELESS = re.compile(
    r"/tokenize|/detokenize|/v1/messages/count_tokens"
    r"|(/v1/(completions|chat/completions|responses|messages)|/cohere/v2/chat)/(render|derender)"
)
"""Posts that change nothing and compute next to nothing."""

_OF_ALL = re.compile(r"/hotspan(/.*)?")
"""Also GET: what one replica says of its cache is not what there is."""


_OF_A_RESPONSE = re.compile(r"/v1/responses/([^/]+)")


def response_of(path: str) -> str:
    """The stored response that a path names, which only the replica that made it has; "" if none."""
    found = _OF_A_RESPONSE.fullmatch(path)
    return found[1] if found else ""


def route_of(method: str, path: str) -> Route:
    """What is done with a request. What is not known and may change something goes to all replicas, never to one."""
    if path in _WORK or _BY_NAME.fullmatch(path):
        return Route.WORK if method == "POST" else Route.ONE
    if path in ("/ping", "/health"):
        return Route.HEALTH
    if path == "/metrics":
        return Route.METRICS
    if path == OWN or path.startswith(f"{OWN}/"):
        return Route.ADMIN
    if _OF_ALL.fullmatch(path):
        return Route.ALL
    if method in ("GET", "HEAD", "OPTIONS") or (method == "POST" and _STATELESS.fullmatch(path)):
        return Route.ONE
    return Route.ALL
