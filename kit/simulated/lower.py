"""Lower tiers for one thread: opened again before anything else happens, or never given up."""

from hotspan.core.clock import Clock
from hotspan.tiers.base import StorageTier, Transfer
from hotspan.tiers.lower import LowerTier


class SettledTier(LowerTier):
    """Goes on only when its tier was opened anew, or refused: the one thread there is, is waited for."""

    def finished(self) -> list[Transfer]:
        transfers = super().finished()
        if self._opening is not None:
            self._opening.join()
        return transfers


class SteadyTier(LowerTier):
    """Takes part whatever its tier does."""

    def _trip(self, reason: str) -> None:
        return


def steady(tier: StorageTier, clock: Clock | None = None) -> SteadyTier:
    """A tier that is open, and never given up."""
    return SteadyTier(lambda again: tier, clock)
