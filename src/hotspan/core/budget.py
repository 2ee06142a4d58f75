"""An amount of something that several owners use at once, of which none can take away another's part."""

from collections.abc import Hashable


class Budget:
    """One half of `amount` is divided equally between the owners; the other half goes to whoever asks first.

    Each owner has at least 1 of its own. Not for several threads at once.

    owners: how many there can be.
    used:   by all owners together.
    """

    def __init__(self, amount: int, owners: int) -> None:
        self.own = max(1, amount // 2 // max(1, owners))
        self._shared = max(0, amount - self.own * owners)
        self._shared_used = 0
        self._used: dict[Hashable, int] = {}

    @property
    def used(self) -> int:
        return sum(self._used.values())

    def take(self, owner: Hashable, amount: int) -> bool:
        """Whether `owner` now uses so much more; if not, nothing has changed."""
        used = self._used.get(owner, 0)
        shared = self._beyond(used + amount) - self._beyond(used)
        if shared > self._shared - self._shared_used:
            return False
        self._shared_used += shared
        self._used[owner] = used + amount
        return True

    def give(self, owner: Hashable, amount: int) -> None:
        """`owner` uses so much less."""
        used = self._used.pop(owner, 0)
        left = used - amount
        self._shared_used -= self._beyond(used) - self._beyond(left)
        if left:
            self._used[owner] = left

    def _beyond(self, used: int) -> int:
        """What of it is beyond the owner's part."""
        return max(0, used - self.own)
