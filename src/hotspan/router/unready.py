"""Models and adapters that a replica cannot serve now, while it serves others: requests for these avoid it."""

from xxhash import xxh3_128_digest

from hotspan.core.clock import Clock
from hotspan.http.upstream import UpstreamResponse
from hotspan.router.parted import Parted

_MAX_NAMES = 4096
_LEAST_S, _MOST_S = 1.0, 60.0
"""Bounds of what a replica's Retry-After counts for."""

_LACKED_S = 10.0
"""How long a replica that has no model of a name is taken to have none."""


class UnreadyModels:
    """Which replicas refused a model as not ready, until their Retry-After is over. One event loop's.

    Names are kept as digests, by owner: they are the clients' to make up, and another owner's adapter of the same name
    is another one.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until_s: Parted[bytes, dict[str, float]] = Parted(_MAX_NAMES)

    def note(self, replica: str, model: str, answer: UpstreamResponse, owner: bytes = b"") -> None:
        """A replica refused a request that names its model so."""
        after = answer.header("retry-after")
        self._avoid(replica, model, owner, min(max(float(after[:6]) if after.isdecimal() else 0.0, _LEAST_S), _MOST_S))

    def lacks(self, replica: str, model: str, owner: bytes = b"") -> None:
        """A replica answered that it has no model of the name in a request."""
        self._avoid(replica, model, owner, _LACKED_S)

    def of(self, model: str, owner: bytes = b"") -> frozenset[str]:
        """The replicas that are not ready for the model that requests of an owner name so."""
        if not self._until_s or (found := self._until_s.get(owner, digest := _digest(model))) is None:
            return frozenset()
        now_s = self._clock.monotonic()
        if left := {replica: until_s for replica, until_s in found.items() if until_s > now_s}:
            self._until_s.put(owner, digest, left)
        else:
            self._until_s.pop(owner, digest)
        return frozenset(left)

    def _avoid(self, replica: str, model: str, owner: bytes, seconds: float) -> None:
        known = self._until_s.get(owner, digest := _digest(model)) or {}
        self._until_s.put(owner, digest, known | {replica: self._clock.monotonic() + seconds})


def _digest(model: str) -> bytes:
    return xxh3_128_digest(model.encode(errors="replace"))
