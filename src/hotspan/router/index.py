"""Which replica holds which pieces of text, and where: one table for all of them, of bounded size.

    key of a piece  ->  a mask: a bit for "asked for recently", and a bit for each place that has the piece

A place is a medium of a replica, or the pieces that the router assumes a replica to have because it sent them there.
There are few different masks, and each exists once. A look-up walks a prompt from its root and works only where the
mask changes. Clearing a place gives it a new bit; later calls sweep the old bit out of the masks step by step.

Beyond the cap, pieces that were not asked for recently are evicted first (CLOCK). The router then does not know that
they are cached, and may choose a slower replica.
"""

import sys
from collections.abc import Iterable, Sequence
from itertools import islice

from hotspan.core.errors import ConfigError
from hotspan.core.types import MIB
from hotspan.router.types import Held, Medium

SHARED = -1
"""Key, in the result of `match`, of what L2 has: it holds for each replica that has no entry of its own."""

ASSUMED = 4
"""A fifth medium: what a replica is assumed to hold because the router sent it there. Counts as GPU."""

LEAST_BYTES = 64 * 1024

_KEY_BYTES = 48
"""Memory of an int of 64 bits in CPython."""

_LIST_BYTES = 9
"""Memory of an entry in the list of pieces to sweep."""

_SLOT_BYTES = 20
"""Memory of a slot of a dict: 4 bytes of index, and 24 for each of the two thirds of the slots that are filled."""

_MASK_BYTES = 240
"""Memory of a shared mask with its spread, in both tables."""

_MAX_MASKS = 8192
_SWEPT = 64
_LEVELS = 4
_ASKED = 1
_NOTHING = Held()


class PrefixIndex:
    """What all replicas hold. For one thread; the time of a call is bounded by its keys."""

    def __init__(self, cap_bytes: int = 256 * MIB) -> None:
        """Raises: ConfigError for a cap below LEAST_BYTES."""
        if cap_bytes < LEAST_BYTES:
            raise ConfigError(f"an index of {cap_bytes} bytes holds nothing; give it at least {LEAST_BYTES}")
        self.cap_bytes = cap_bytes
        self.max_pieces = _max_entries(cap_bytes - min(cap_bytes // 4, _MAX_MASKS * _MASK_BYTES))
        self.evicted = 0
        self._max_masks = min(_MAX_MASKS, cap_bytes // 4 // _MASK_BYTES)
        self._pieces: dict[int, int] = {}
        self._masks: dict[int, int] = {}
        self._spreads: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._places: dict[tuple[int, int], int] = {}
        self._free: list[int] = []
        self._bits = 1
        self._live = _ASKED
        self._dead: list[int] = []
        self._sweeping: list[int] = []
        self._to_sweep: list[int] = []
        self._hand: list[int] = []

    def __len__(self) -> int:
        return len(self._pieces)

    @property
    def bytes(self) -> int:
        """Its memory, keys included."""
        lists = sys.getsizeof(self._to_sweep) + sys.getsizeof(self._hand)
        return sys.getsizeof(self._pieces) + _KEY_BYTES * len(self._pieces) + _MASK_BYTES * len(self._masks) + lists

    def add(self, replica: int, medium: Medium | int, keys: Iterable[int]) -> None:
        """A replica has these pieces now."""
        bit, live = self._bit(replica, medium), self._live
        pieces, share = self._pieces, self._share
        before = new = -1
        for key in keys:
            mask = pieces.get(key, 0)
            if mask is not before:
                before, new = mask, share(mask & live | bit)
            if new is not mask:
                pieces[key] = new
                if not mask and len(pieces) > self.max_pieces:
                    self._evict()
        if self._to_sweep:
            self._sweep()

    def remove(self, replica: int, medium: Medium | int, keys: Iterable[int]) -> None:
        """A replica does not have these pieces any more."""
        place = self._places.get(_place(replica, medium))
        if place is None:
            return
        left, pieces = self._live & ~place, self._pieces
        for key in keys:
            mask = pieces.get(key, 0)
            if mask & place:
                mask &= left
                if mask & ~_ASKED:
                    pieces[key] = self._share(mask)
                else:
                    del pieces[key]
        if self._to_sweep:
            self._sweep()

    def reported(self, replica: int, keys: Iterable[int]) -> int:
        """How many of some pieces events reported of a replica, in any medium of its own."""
        kinds = (Medium.GPU, Medium.RAM, Medium.DISK)
        bits = [self._places.get(_place(replica, kind), 0) for kind in kinds]
        mask = bits[0] | bits[1] | bits[2]
        return sum(1 for key in keys if self._pieces.get(key, 0) & mask)

    def clear(self, replica: int, medium: Medium | int | None = None) -> None:
        """A replica has nothing any more: in one medium, or in all but L2."""
        kinds = (Medium.GPU, Medium.RAM, Medium.DISK, ASSUMED) if medium is None else (medium,)
        for kind in kinds:
            bit = self._places.pop(_place(replica, kind), None)
            if bit is not None:
                self._live &= ~bit
                self._dead.append(bit)
        for spreads in self._spreads:
            spreads.clear()
        if not self._to_sweep:
            self._sweep()

    def match(self, keys: Sequence[int], *, assumed_only: bool = False) -> dict[int, Held]:
        """How much each replica has of a prompt's beginning, for those that have any, and SHARED if L2 has any.

        assumed_only: only what the router sent there.
        """
        pieces, spreads = self._pieces, self._spreads[assumed_only]
        alive, before = -1, -1
        ends: list[tuple[int, int]] = []
        for at, key in enumerate(keys):
            mask = pieces.get(key, 0)
            if mask is before:
                continue
            if mask and not mask & _ASKED:
                pieces[key] = mask = self._share(mask | _ASKED)
                if mask is before:
                    continue
            before = mask
            spread = spreads.get(mask)
            if spread is None:
                spread = self._spread(mask, assumed_only)
            still = alive & spread
            if still != alive:
                if at:
                    ends.append((at, alive & ~still))
                alive = still
                if not still:
                    break
        else:
            if alive > 0:
                ends.append((len(keys), alive))
        return _held(ends)

    def check(self) -> None:
        """Raise AssertionError if its state is inconsistent."""
        if len(self._pieces) > self.max_pieces or self.bytes > self.cap_bytes:
            raise AssertionError(f"{len(self._pieces)} pieces, {self.bytes} bytes: over the cap of {self.cap_bytes}")
        live = _ASKED
        for bit in self._places.values():
            if bit & live or bit.bit_count() != 1:
                raise AssertionError(f"two places have the bit {bit:#x}")
            live |= bit
        gone = sum(self._dead) | sum(self._sweeping)
        if (live | gone | sum(self._free)).bit_length() != self._bits:
            raise AssertionError("a mask is longer than its bits")
        if live != self._live or live & gone or any(bit & (live | gone) for bit in self._free):
            raise AssertionError("a bit is in two states")
        if any(not mask & ~_ASKED or mask & ~(live | gone) for mask in self._pieces.values()):
            raise AssertionError("a piece is nowhere, or at a place that is not one")

    # -- inside ----------------------------------------------------------------------------------------------------

    def _bit(self, replica: int, medium: int) -> int:
        place = _place(replica, medium)
        bit = self._places.get(place)
        if bit is None:
            if self._free:
                bit = self._free.pop()
            else:
                bit = 1 << self._bits
                self._bits += 1
            self._places[place] = bit
            self._live |= bit
            for spreads in self._spreads:
                spreads.clear()
        return bit

    def _share(self, mask: int) -> int:
        """The one object that stands for this mask."""
        found = self._masks.get(mask)
        if found is None:
            if len(self._masks) >= self._max_masks:
                self._masks.clear()
                for spreads in self._spreads:
                    spreads.clear()
            self._masks[mask] = found = mask
        return found

    def _spread(self, mask: int, assumed_only: bool) -> int:
        """Four bits per replica, SHARED first: whether it has the piece in this medium or a faster one."""
        spread = every = 0
        for (replica, kind), bit in self._places.items():
            if not mask & bit or (assumed_only and kind != ASSUMED):
                continue
            if kind == Medium.L2:
                every = 1
            else:
                level = Medium.GPU if kind == ASSUMED else kind
                spread |= (0xF << level & 0xF) << _LEVELS * (replica + 1)
        if every:
            last = max((replica for replica, _ in self._places), default=SHARED) + 1
            for slot in range(last + 1):
                spread |= 1 << _LEVELS * slot + Medium.L2
        self._spreads[assumed_only][mask] = spread
        return spread

    def _evict(self) -> None:
        """Remove the oldest piece that was not asked for since the last look at it."""
        pieces, live = self._pieces, self._live
        while True:
            if not self._hand:
                self._hand = list(islice(pieces, 1 + len(pieces) // 16))
                self._hand.reverse()
            key = self._hand.pop()
            mask = pieces.pop(key, 0)
            if mask & _ASKED and mask & live & ~_ASKED:
                pieces[key] = self._share(mask & live & ~_ASKED)
            elif mask:
                self.evicted += 1
                return

    def _sweep(self) -> None:
        """Remove dead bits from some more masks; bits that die meanwhile are removed in the next round."""
        pieces, live = self._pieces, self._live
        batch = self._to_sweep[-_SWEPT:]
        del self._to_sweep[-_SWEPT:]
        for key in batch:
            mask = pieces.get(key, 0)
            if mask & ~live:
                mask &= live
                if mask & ~_ASKED:
                    pieces[key] = self._share(mask)
                else:
                    del pieces[key]
        if not self._to_sweep:
            self._free += self._sweeping
            self._sweeping, self._dead = self._dead, []
            self._to_sweep = list(pieces) if self._sweeping else []


def _place(replica: int, medium: int) -> tuple[int, int]:
    return (SHARED if medium == Medium.L2 else replica, int(medium))


def _held(ends: Sequence[tuple[int, int]]) -> dict[int, Held]:
    """The lengths by replica. ends: at which piece which bits ended; those of a replica mostly end together."""
    found: dict[int, Held] = {}
    for at, lost in ends:
        replica = SHARED
        while lost:
            levels = lost & 0xF
            if levels == 0xF:
                found[replica] = Held(at, at, at, at)
            elif levels:
                gpu, ram, disk, l2 = found.get(replica, _NOTHING)
                found[replica] = Held(
                    at if levels & 1 else gpu,
                    at if levels & 2 else ram,
                    at if levels & 4 else disk,
                    at if levels & 8 else l2,
                )
            lost >>= _LEVELS
            replica += 1
    return found


def _max_entries(cap_bytes: int) -> int:
    """Maximum number of entries of a dict that stays below a size, also while it is copied to a new table.

    The new table of a full dict has the first power of two above three times its entries.
    """
    most, slots = 1, 8
    while 2 * _SLOT_BYTES * slots < cap_bytes:
        most = max(most, min(slots // 3, (cap_bytes - 2 * _SLOT_BYTES * slots) // (_KEY_BYTES + _LIST_BYTES)))
        slots *= 2
    return most
