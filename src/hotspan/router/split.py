"""Which group of replicas a session belongs to: `--split canary=10%` sends a tenth of the sessions there for good.

By weighted rendezvous hashing, as sessions find their replicas: several routers agree without asking each other, and
when a share changes, only sessions move that have to.
"""

from collections.abc import Mapping

from hotspan.router.session import Rendezvous

REST = ""
"""The replicas of all groups without a share, as one group."""

_PREFIX = "group "
"""So that a group called like a replica does not draw that replica's numbers."""


class Split:
    """The groups' shares of the sessions. What no share names goes to the rest.

    shares: by group, from 0 to 1; they add up to 1 at most.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        weights = {**shares, REST: max(0.0, 1.0 - sum(shares.values()))}
        self._groups = {_PREFIX + group: group for group, weight in weights.items() if weight > 1e-9}
        self._rendezvous = Rendezvous()
        for name, group in self._groups.items():
            self._rendezvous.add(name, weights[group])

    def group(self, session: bytes) -> str:
        """The group of a session; "" is the rest."""
        if len(self._groups) == 1:
            return next(iter(self._groups.values()))
        return self._groups[self._rendezvous.home(session, self._groups) or _PREFIX]
