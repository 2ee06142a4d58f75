"""Sessions that live at one replica: SageMaker's NEW_SESSION makes one there, and only there it is known.

NEW_SESSION -> the cheapest replica -> its answer names the id -> bound here until it expires
ID          -> that replica          CLOSE -> that replica, and forgotten here
"""

from collections import OrderedDict
from datetime import UTC, datetime

from hotspan.core.clock import Clock
from hotspan.router.session import NEW_SESSION

NEW_HEADER, CLOSED_HEADER = "x-amzn-sagemaker-new-session-id", "x-amzn-sagemaker-closed-session-id"

_LASTS_S = 1200.0
"""A session whose answer says no time."""

_MAX_ID = 256


class StatefulSessions:
    """Which replica made which session; the longest unused are forgotten when there are too many.

    lost: sessions whose replica was gone when they were asked for.
    """

    def __init__(self, clock: Clock, most: int = 65_536) -> None:
        self._clock = clock
        self._most = most
        self._homes: OrderedDict[str, tuple[str, float]] = OrderedDict()
        self.lost = 0

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, name: str | None) -> str | None:
        """The replica of a session; None if it is not known here, or over."""
        if not name or name == NEW_SESSION or name not in self._homes:
            return None
        replica, ends_s = self._homes[name]
        if ends_s <= self._clock.unix():
            del self._homes[name]
            return None
        self._homes.move_to_end(name)
        return replica

    def heard(self, replica: str, new: str, closed: str) -> None:
        """What an answer of a replica says of sessions, by its headers; "" says nothing."""
        if closed:
            self._homes.pop(closed.strip(), None)
        name, _, rest = new.partition(";")
        name = name.strip()
        if not name or len(name) > _MAX_ID:
            return
        self._homes[name] = (replica, self._ends_s(rest))
        self._homes.move_to_end(name)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)

    def lose(self, name: str) -> None:
        """A session's replica is gone, and so is the session."""
        if self._homes.pop(name, None) is not None:
            self.lost += 1

    def _ends_s(self, attributes: str) -> float:
        _, _, given = attributes.partition("Expires=")
        try:
            return datetime.strptime(given.strip(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
        except ValueError:
            return self._clock.unix() + _LASTS_S
