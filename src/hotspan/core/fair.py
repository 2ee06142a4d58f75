"""In which order work of several owners is begun: one who asks for much does not keep the others waiting."""

from collections.abc import Hashable


class FairOrder:
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996): places in a queue that is served by place.

    The work of an owner is placed behind its own earlier work, by the cost of that, and no earlier than what is begun
    now: an owner with little waiting goes before what another one has piled up, and nobody saves up for later.
    For names of owners that the operator gives: one number is kept of each.
    """

    def __init__(self) -> None:
        self._now = 0
        self._ends: dict[Hashable, int] = {}

    def place(self, owner: Hashable, cost: int) -> int:
        """The place of new work; smaller ones are served first, and equal ones as they came."""
        place = max(self._now, self._ends.get(owner, 0))
        self._ends[owner] = place + max(1, cost)
        return place

    def began(self, place: int) -> None:
        """The work with this place is begun."""
        self._now = max(self._now, place)
