"""Which windows are known: found at any offset of a prompt by a rolling hash, and confirmed by their tokens.

    hash of every offset (numpy) -> filter of counts -> dict of the owner -> SHA-256 of the tokens, compared

A window that was seen once is a sighting. Seen again elsewhere, it is worth storing. Memory is bounded.
"""

import hashlib
import secrets
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from operator import itemgetter

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from hotspan.core.types import ChunkKey
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.windows import Tokens

Hashes = npt.NDArray[np.uint64]

MAX_WINDOWS = 1 << 17
"""17 million tokens in windows of 128; about 40 MB when full."""

MAX_OWNERS = 1024
"""Owners that are remembered; the one that was unused for longest goes first."""

MAX_FALSE = 64
"""Candidates of one prompt whose tokens turn out to be others: as many are confirmed before the search ends."""

_FILTER_PLACES = 8
"""Counters of the filter for each window: about one offset in as many is looked up without being a candidate."""

_MIX = np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


class Window(Struct, gc=False):
    """A window that was seen.

    key:      of its KV, in the namespace of its owner; made of its tokens.
    position: of its first token in the prompt that it was stored from, or seen in.
    """

    key: ChunkKey
    position: int


class Found(Struct, frozen=True, gc=False):
    """Where a prompt has a known window."""

    run: Run
    window: Window


Owner = bytes
"""Namespace, tenant and adapter in one digest: windows of different owners never meet."""

Named = Callable[[Tokens], ChunkKey]
"""The key of a window's KV, from its tokens."""


def rolling_hashes(tokens: Tokens, width: int, key: int) -> Hashes:
    """A keyed 64-bit hash of each `width` tokens in a row, equal for equal tokens at whatever offset.

    Shape: uint64[len(tokens) - width + 1]; empty for a shorter text.
    Windows of 2, 4, 8 ... tokens are made of two halves each, mixed in between, so that no texts collide for all keys
    (a polynomial modulo 2^64 has such texts). About 0.1 us per token.
    """
    if width < 1:
        raise ValueError(f"a window has at least one token, not {width}")
    if len(tokens) < width:
        return np.empty(0, np.uint64)
    seeds = np.frombuffer(hashlib.shake_256(key.to_bytes(8, "little")).digest(16 * 66), np.uint64) | np.uint64(1)
    hashes = _mixed(tokens.astype(np.uint64) * seeds[0] + seeds[1])
    size, level = 1, 1
    while size < width:
        step = min(size, width - size)  # the last two halves overlap, if the width is no power of two
        hashes = _mixed(hashes[:-step] * seeds[2 * level] + hashes[step:] * seeds[2 * level + 1])
        size, level = size + step, level + 1
    return hashes


def _mixed(hashes: Hashes) -> Hashes:
    hashes ^= hashes >> _HALF
    hashes *= _MIX
    hashes ^= hashes >> _HALF
    return hashes


class WindowIndex:
    """The windows of all owners. One thread calls it.

    width:       tokens of a window.
    max_windows: of all owners together. When it is full, the owner with the most windows loses its oldest.
    """

    def __init__(
        self, width: int, *, max_windows: int = MAX_WINDOWS, max_owners: int = MAX_OWNERS, secret: bytes | None = None
    ) -> None:
        if min(width, max_windows, max_owners) < 1:
            raise ValueError("an index has room for a window of a token of an owner at least")
        self.width = width
        self._max_windows = max_windows
        self._max_owners = max_owners
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._owners: OrderedDict[Owner, OrderedDict[int, Window]] = OrderedDict()
        bits = (max_windows * _FILTER_PLACES).bit_length()
        self._shift = 64 - bits
        self._filter = np.zeros(1 << bits, np.uint32)  # how many windows have the first bits of a hash
        self._count = 0
        self.false_candidates = 0

    def __len__(self) -> int:
        return self._count

    def find(self, owner: Owner, tokens: Tokens, named: Named, search: Run | None = None) -> list[Found]:
        """The known windows that cover most of a text, sightings included, from left to right.

        search: only windows within these positions. Each was confirmed by its tokens. Windows overlap where that
        covers more; then each begins and ends behind the one before it.
        """
        search = Run(0, len(tokens)) if search is None else search
        known = self._owners.get(owner)
        if not known:
            return []
        self._owners.move_to_end(owner)
        candidates = [(at, name) for at, name in self._candidates(owner, tokens, search) if name in known]
        found: list[Found] = []
        covered, first, false = search.start, 0, 0
        while first < len(candidates) and false < MAX_FALSE:
            # the last one that leaves no gap, else the next one
            chosen = max(first, bisect_right(candidates, covered, key=itemgetter(0)) - 1)
            offset, name = candidates[chosen]
            window, run = known[name], Run(offset, offset + self.width)
            if window.key != named(tokens[run.start : run.stop]):
                self.false_candidates += 1
                false += 1
                del candidates[chosen]
                continue
            known.move_to_end(name)
            found.append(Found(run, window))
            covered, first = run.stop, chosen + 1
        return found

    def note(self, owner: Owner, tokens: Tokens, key: ChunkKey, position: int) -> Window:
        """A window is in a prompt at `position`: it is known from now on. Returns what is known of it.

        Raises: ValueError for tokens that are no window.
        """
        if len(tokens) != self.width:
            raise ValueError(f"a window has {self.width} tokens, not {len(tokens)}")
        name = int(rolling_hashes(tokens, self.width, self._key(owner))[0])
        known = self._owners.get(owner)
        if known is None:
            known = self._admit(owner)
        self._owners.move_to_end(owner)
        window = known.get(name)
        if window is not None and window.key == key:
            known.move_to_end(name)
            return window
        if window is not None:
            del known[name]
            self._uncount(name)
        self._make_room()
        window = known[name] = Window(key, position)
        self._filter[name >> self._shift] += 1
        self._count += 1
        return window

    def discard(self, owner: Owner, tokens: Tokens) -> None:
        """Forget a window by its tokens, if it is known."""
        name = int(rolling_hashes(tokens, self.width, self._key(owner))[0])
        known = self._owners.get(owner)
        if known is not None and known.pop(name, None) is not None:
            self._uncount(name)

    def forget_owner(self, owner: Owner) -> int:
        """Forget all windows of an owner; returns how many."""
        known = self._owners.pop(owner, None)
        for name in known or ():
            self._uncount(name)
        return len(known or ())

    def check(self) -> None:
        """Raise AssertionError if owners, filter and count do not agree."""
        counts = Counter(name >> self._shift for known in self._owners.values() for name in known)
        assert counts.total() == self._count <= self._max_windows
        assert {place: int(self._filter[place]) for place in np.flatnonzero(self._filter).tolist()} == counts
        assert len(self._owners) <= self._max_owners

    def _candidates(self, owner: Owner, tokens: Tokens, search: Run) -> Iterator[tuple[int, int]]:
        """Offsets whose hash may be known, with the hash."""
        hashes = rolling_hashes(tokens[search.start : search.stop], self.width, self._key(owner))
        offsets = np.flatnonzero(self._filter[hashes >> np.uint64(self._shift)])
        yield from zip((offsets + search.start).tolist(), hashes[offsets].tolist(), strict=True)

    def _key(self, owner: Owner) -> int:
        """What an owner's hashes are keyed with: who does not know the secret can't make texts that collide."""
        return int.from_bytes(hashlib.blake2b(owner, key=self._secret, digest_size=8).digest(), "little")

    def _admit(self, owner: Owner) -> OrderedDict[int, Window]:
        while len(self._owners) >= self._max_owners:
            self.forget_owner(next(iter(self._owners)))
        known = self._owners[owner] = OrderedDict()
        return known

    def _make_room(self) -> None:
        while self._count >= self._max_windows:
            largest = max(self._owners.values(), key=len)
            name, _ = largest.popitem(last=False)
            self._uncount(name)

    def _uncount(self, name: int) -> None:
        self._filter[name >> self._shift] -= 1
        self._count -= 1
