"""Who answers a path: the best replica, any one, all of them, or the router itself."""

import re
from enum import Enum

from hotspan.http.dashboard import DASHBOARD
from hotspan.http.paths import BY_NAME, INVOCATIONS, PREFETCH, STATELESS, WARM, WORK

OWN = "/router"
REPLICAS, DRAIN, RESUME = f"{OWN}/replicas", f"{OWN}/replicas/drain", f"{OWN}/replicas/resume"
CACHE = f"{OWN}/cache"
MODELS = f"{OWN}/models"
CANARY, RESET = f"{OWN}/canary", f"{OWN}/canary/reset"

OWN_ROUTES = {
    f"GET {REPLICAS}": "The replicas: health, load, what the router knows of their caches.",
    f"GET {CACHE}": "Tiers and tenants summed over the replicas, which are asked now. The dashboard shows it.",
    f"GET {MODELS}": "The names of models and adapters, and the replicas that serve each; replicas are asked now.",
    f"POST {DRAIN}": 'Take the replica of `{"replica": URL}` out of service.',
    f"POST {RESUME}": 'Put the replica of `{"replica": URL}` back into service.',
    f"GET {CANARY}": "What shadow requests found, by group.",
    f"POST {RESET}": 'End the rollback of the group of `{"group": NAME}`.',
}
"""The administrator's routes, answered by the router."""


class Route(Enum):
    """How a request is answered.

    WORK:  by the best replica. ONE: by any replica. ALL: by every replica. PREFETCH: by the replica that would get the
    request, or by all. WARM: by none. The others by the router.
    """

    WORK = "work"
    ONE = "one"
    ALL = "all"
    PREFETCH = "prefetch"
    WARM = "warm"
    HEALTH = "health"
    METRICS = "metrics"
    DASHBOARD = "dashboard"
    ADMIN = "admin"


_WORK = frozenset((INVOCATIONS, *WORK))
_BY_NAME = re.compile("|".join(re.sub(r"\{\w+\}", "[^/]+", path) for path in BY_NAME))
_OF_ALL = re.compile(r"/hotspan(/.*)?")
"""Also GET: what one replica says of its cache is not what there is."""

_OF_A_RESPONSE = re.compile(r"/v1/responses/([^/]+)(?:/cancel)?")


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
    if path == DASHBOARD:
        return Route.DASHBOARD
    if path == OWN or path.startswith(f"{OWN}/"):
        return Route.ADMIN
    if path == PREFETCH and method == "POST":
        return Route.PREFETCH
    if path == WARM or path.startswith(f"{WARM}/"):
        return Route.WARM
    if _OF_ALL.fullmatch(path):
        return Route.ALL
    if method in ("GET", "HEAD", "OPTIONS") or (method == "POST" and (path in STATELESS or response_of(path))):
        return Route.ONE
    return Route.ALL
