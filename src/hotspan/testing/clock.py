"""A clock that the test turns."""


class SimulatedClock:
    """Stands still until `advance`; both of its readings move together."""

    def __init__(self, monotonic_s: float = 1000.0, unix_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._unix_s = unix_s

    def monotonic(self) -> float:
        return self._monotonic_s

    def unix(self) -> float:
        return self._unix_s

    def advance(self, seconds: float) -> None:
        """Let time pass. Raises: ValueError for a negative time."""
        if seconds < 0:
            raise ValueError("time does not run backwards")
        self._monotonic_s += seconds
        self._unix_s += seconds
