"""Models and adapters that a replica cannot serve now, while it serves others: requests for these avoid it."""

from xxhash import xxh3_128_digest

from hotspan.core.clock import Clock
from hotspan.http.upstream import UpstreamResponse
from hotspan.router.session import Recent

_MAX_NAMES = 4096
_LEAST_S, _MOST_S = 1.0, 60.0
"""Bounds of what a replica's Retry-After counts for."""

_LACKED_S = 10.0
"""How long a replica that has no model of a name is taken to have none."""


class UnreadyModels:
    """Which replicas refused a model as not ready, until their Retry-After is over. One event loop's.

    Names are kept as digests: they are the clients' to make up.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: Recent[bytes, dict[str, float]] = Recent(_MAX_NAMES)

    def note(self, replica: str, model: str, answer: UpstreamResponse) -> None:
        """A replica refused a request that names its model so."""
        after = answer.header("retry-after")
        wait_s = min(max(float(after[:6]) if after.isdecimal() else 0.0, _LEAST_S), _MOST_S)
        digest = _digest(model)
        self._until_s[digest] = (self._until_s.used(digest) or {}) | {replica: self._clock.monotonic() + wait_s}

    def lacks(self, replica: str, model: str) -> None:
        """A replica answered that it has no model of the name in a request."""
        digest = _digest(model)
        self._until_s[digest] = (self._until_s.used(digest) or {}) | {replica: self._clock.monotonic() + _LACKED_S}

    def of(self, model: str) -> frozenset[str]:
        """The replicas that are not ready for the model that requests name so."""
        if not self._until_s or (found := self._until_s.get(digest := _digest(model))) is None:
            return frozenset()
        now_s = self._clock.monotonic()
        if left := {replica: until_s for replica, until_s in found.items() if until_s > now_s}:
            self._until_s[digest] = left
        else:
            del self._until_s[digest]
        return frozenset(left)


def _digest(model: str) -> bytes:
    return xxh3_128_digest(model.encode(errors="replace"))
