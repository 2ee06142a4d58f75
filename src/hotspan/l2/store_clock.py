"""The time by a store's clock: what expires there does so by it, whatever a replica's own clock says."""

from collections.abc import Callable

from hotspan.core.clock import Clock
from hotspan.core.terms import Terms


class StoreClock:
    """A Clock. offset_s: by how much the store's clock is ahead of the replica's, as far as it is known now."""

    def __init__(self, own: Clock, offset_s: Callable[[], int]) -> None:
        self._own = own
        self._offset_s = offset_s

    def monotonic(self) -> float:
        return self._own.monotonic()

    def unix(self) -> float:
        return self._own.unix() + self._offset_s()

    def there(self, terms: Terms) -> Terms:
        """A replica's terms as the store has them."""
        return _later(terms, self._offset_s())

    def here(self, terms: Terms) -> Terms:
        """The store's terms as the replica has them."""
        return _later(terms, -self._offset_s())


def _later(terms: Terms, seconds: int) -> Terms:
    return terms.until(max(1, terms.expires_s + seconds)) if terms.expires_s and seconds else terms
