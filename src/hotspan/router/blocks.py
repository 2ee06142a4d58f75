"""The pieces of texts that one replica holds, computed from blocks that the engine names by its own hashes.

A block follows its parent; the bytes of its tokens give its place in the text:

    bytes    0         512        1024
    blocks   |a  |b  |c  |d  |e  |f  |          512 is in the middle of c or d: nothing is aligned
    pieces   |piece 0  |piece 1  |              piece 1 is held if c or d, e and f are, and the one that ends behind it

A medium holds a piece if it holds all blocks that overlap the piece. What is uncertain is not claimed:

- A hash that is stored twice and removed once counts as removed. Engines send an event for each physical copy, but
  also repeat events of blocks that were there already, so counting would claim too much.
- With several KV cache groups one counts: the first with full attention where events say so, else group 0. A window
  that slid on in another group can make the engine's own hit shorter.
- No block is placed behind an image or an embedding, with an unknown parent or adapter, or at the beginning of a text
  if a lower tier does not say whether the block is salted.
- Texts are compared, not tokens: two ways to cut the same text into tokens count as one.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

from xxhash import xxh3_64_intdigest

from hotspan.router.event_messages import Hash, Removed, Stored
from hotspan.router.types import PIECE_BYTES, Medium

_MEDIA = {
    "GPU": Medium.GPU,
    "CPU": Medium.RAM,
    "RAM": Medium.RAM,
    "DISK": Medium.DISK,
    "STORAGE": Medium.DISK,
    "L2": Medium.L2,
}
_FULL = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
_NONE = -1
_MASK = (1 << 64) - 1
_STEP = 4096

Join = Callable[[Sequence[int]], "bytes | None"]
"""The bytes of tokens; None if a token is unknown."""

RootOf = Callable[[str, str], "int | None"]
"""The key that a text's pieces are chained from, by the engine's names of adapter and salt."""


def medium_of(name: str | None) -> Medium | None:
    """The medium that an event names; without a name it is the GPU. None if it is unknown."""
    return Medium.GPU if name is None else _MEDIA.get(name.upper())


class Blocks:
    """The blocks of one replica.

    cap:     maximum number of blocks. The oldest blocks that no medium holds and no other block follows are dropped
             first; if there are none, new blocks are not taken.
    unknown: blocks of events that could not be placed. ignored: those of other groups and media.
    dropped: blocks that were not taken.

    Takes about 5 us per new block of 16 tokens, 0.1 us per known block, and 0.25 KB per block.
    """

    def __init__(self, join: Join, root_of: RootOf, cap: int = 1_000_000) -> None:
        self._join, self._root_of, self._cap = join, root_of, cap
        self.unknown = self.ignored = self.dropped = 0
        self._group: int | None = None
        self.clear()

    def __len__(self) -> int:
        return len(self._numbers)

    def clear(self) -> None:
        """Forget everything."""
        self._numbers: dict[int, int] = {}
        self._free: list[int] = []
        self._spare: OrderedDict[int, None] = OrderedDict()  # held by nothing and with nothing behind, oldest first
        self._hash, self._key = array("Q"), array("Q")  # _key: of the last piece that ends in the block or before
        self._parent, self._child = array("i"), array("i")
        self._next, self._prev = array("i"), array("i")  # children of the same parent
        self._start = array("H")  # how many bytes of the piece that is open at the block's start lie before it
        self._media = bytearray()
        self._text: list[bytes] = []
        self._inner: dict[
            int, tuple[int, ...]
        ] = {}  # of blocks in which several pieces end: the keys of all but the last

    # -- events ------------------------------------------------------------------------------------------------------

    def store(self, event: Stored) -> tuple[Medium, list[int]] | None:
        """Apply stored blocks; the medium, and the keys of the pieces that it holds since. None if ignored."""
        medium = medium_of(event.medium)
        if medium is None or not self._counts(event.group_idx, event.kv_cache_spec_kind):
            self.ignored += len(event.block_hashes)
            return None
        hashes = [_number(each) for each in event.block_hashes]
        known, bit = self._numbers, 1 << medium
        found: list[int] = []
        for at, name in enumerate(hashes):
            block = known.get(name)
            if block is None:
                return medium, found + self._place(event, hashes, at, medium)
            if not self._media[block] & bit:
                self._hold(block, bit)
                found += self._whole(block, bit)
        return medium, found

    def remove(self, event: Removed) -> tuple[Medium, list[int]] | None:
        """Apply removed blocks; the medium, and the keys of the pieces that it held until now. None if ignored."""
        medium = medium_of(event.medium)
        if medium is None or event.group_idx not in (None, self._group or 0):
            self.ignored += len(event.block_hashes)
            return None
        bit, lost = 1 << medium, []
        for each in event.block_hashes:
            block = self._numbers.get(_number(each))
            if block is None:
                self.unknown += 1
            elif self._media[block] & bit:
                lost += self._whole(block, bit)
                self._media[block] &= ~bit
                self._offer(block)
        return medium, lost

    # -- state -------------------------------------------------------------------------------------------------------

    def held(self) -> Iterator[tuple[Medium, list[int]]]:
        """All pieces that are held, by medium, in portions. Nothing may change meanwhile."""
        found: dict[Medium, list[int]] = {medium: [] for medium in Medium}
        for turn, block in enumerate(self._numbers.values(), 1):
            media = self._media[block]
            for medium, keys in found.items():
                if media >> medium & 1:
                    keys += self._ended(block, 1 << medium)
            if turn % _STEP == 0:
                yield from ((medium, list(keys)) for medium, keys in found.items())
                for keys in found.values():
                    keys.clear()
        yield from found.items()

    def check(self) -> None:
        """Raise AssertionError if its state is inconsistent."""
        if len(self._numbers) > self._cap or len(self._numbers) + len(self._free) != len(self._text):
            raise AssertionError("more blocks than may be, or lost ones")
        for name, block in self._numbers.items():
            parent, children = self._parent[block], list(self._children(block))
            if self._hash[block] != name or any(self._parent[child] != block for child in children):
                raise AssertionError("a block is not where it should be")
            if parent != _NONE and (block not in self._children(parent) or self._open(parent) != self._start[block]):
                raise AssertionError("a block does not stand behind its parent")
            if (block in self._spare) != (not children and not self._media[block]):
                raise AssertionError("a block is spare that is not, or the other way round")

    # -- inside: places of blocks ------------------------------------------------------------------------------------

    def _counts(self, group: int | None, kind: str | None) -> bool:
        if kind is None:
            return group in (None, self._group or 0)
        if kind not in _FULL:
            return False
        if self._group is None:
            self._group = group or 0
        return (group or 0) == self._group

    def _place(self, event: Stored, hashes: list[int], at: int, medium: Medium) -> list[int]:
        """Put the blocks of an event, from the unknown one at `at` on, into their text."""
        left, size, bit = len(hashes) - at, event.block_size, 1 << medium
        tokens, extra = event.token_ids, event.extra_keys
        if size <= 0 or len(tokens) != size * len(hashes) or (extra is not None and len(extra) != len(hashes)):
            self.unknown += left
            return []
        if at:
            parent = self._numbers[hashes[at - 1]]
        elif event.parent_block_hash is not None:
            parent = self._numbers.get(_number(event.parent_block_hash), _NONE)
        else:
            parent = _NONE
        if parent == _NONE:
            root = self._root(event, medium)
            if root is None:
                self.unknown += left
                return []
            tail, key = b"", root
        else:
            tail, key = self._tail(parent), self._key[parent]
        return self._grow(event, hashes, at, parent, bit, tail, key)

    def _grow(
        self, event: Stored, hashes: list[int], at: int, parent: int, bit: int, tail: bytes, key: int
    ) -> list[int]:
        """Add blocks one after the other. tail: the open piece's bytes before them; key: of the piece before it."""
        found: list[int] = []
        size, tokens, extra, name = event.block_size, event.token_ids, event.extra_keys, event.lora_name
        for index in range(at, len(hashes)):
            block = self._numbers.get(hashes[index])
            if block is not None:  # its other ancestors were not known: go on behind it
                if not self._media[block] & bit:
                    self._hold(block, bit)
                    found += self._whole(block, bit)
                parent, tail, key = block, self._tail(block), self._key[block]
                continue
            text = self._join(tokens[index * size : (index + 1) * size])
            is_plain = extra is None or not extra[index] or _is_plain(extra[index], name, is_root=parent == _NONE)
            if not text or not is_plain or not self._has_room(parent):
                self.unknown += len(hashes) - index
                break
            start, tail, keys = len(tail), tail + text, []
            while len(tail) >= PIECE_BYTES:
                key = xxh3_64_intdigest(tail[:PIECE_BYTES], key)
                tail = tail[PIECE_BYTES:]
                keys.append(key)
            parent = self._add(hashes[index], parent, text, start, key, bit)
            if keys:
                if len(keys) > 1:
                    self._inner[parent] = tuple(keys[:-1])
                found += self._ended(parent, bit) if start else keys
        return found

    def _root(self, event: Stored, medium: Medium) -> int | None:
        """The key that a text's first block is chained from; None if it is no first block, or if that is unknown."""
        extra = event.extra_keys
        if event.parent_block_hash is not None or (event.lora_name is None and event.lora_id is not None):
            return None
        if extra is None and medium is not Medium.GPU:
            return None
        salts = _names(extra[0], event.lora_name) if extra and extra[0] else []
        if salts is None or len(salts) > 1:
            return None
        return self._root_of(event.lora_name or "", salts[0] if salts else "")

    def _tail(self, block: int) -> bytes:
        """The bytes of the piece that is open where a block ends."""
        need = self._open(block)
        if not need:
            return b""
        parts: list[bytes] = []
        while need > 0:
            text = self._text[block]
            parts.append(text[-need:])
            need -= len(text)
            block = self._parent[block]
        parts.reverse()
        return b"".join(parts)

    def _open(self, block: int) -> int:
        return (self._start[block] + len(self._text[block])) % PIECE_BYTES

    def _children(self, block: int) -> Iterator[int]:
        child = self._child[block]
        while child != _NONE:
            yield child
            child = self._next[child]

    # -- inside: which pieces are whole ------------------------------------------------------------------------------

    def _whole(self, block: int, bit: int) -> list[int]:
        """The keys of the pieces that overlap a held block and whose other blocks are held too."""
        keys = list(self._ended(block, bit))
        opened = self._open(block)
        if (
            not opened
            or self._child[block] == _NONE
            or not self._has_before(block, opened - len(self._text[block]), bit)
        ):
            return keys
        ways = [(child, PIECE_BYTES - opened) for child in self._children(block)]
        while ways:
            below, need = ways.pop()
            if not self._media[below] & bit:
                continue
            need -= len(self._text[below])
            if need <= 0:
                inner = self._inner.get(below)
                keys.append(inner[0] if inner else self._key[below])
            else:
                ways += [(child, need) for child in self._children(below)]
        return keys

    def _ended(self, block: int, bit: int) -> Sequence[int]:
        """The keys of the pieces that end in a held block and are whole."""
        start = self._start[block]
        if start + len(self._text[block]) < PIECE_BYTES:
            return ()
        keys = (*self._inner.get(block, ()), self._key[block])
        return keys if not start or self._has_before(block, start, bit) else keys[1:]

    def _has_before(self, block: int, need: int, bit: int) -> bool:
        """Whether the `need` bytes before a block are held."""
        media, text, parents = self._media, self._text, self._parent
        while need > 0:
            block = parents[block]
            if not media[block] & bit:
                return False
            need -= len(text[block])
        return True

    # -- inside: records ---------------------------------------------------------------------------------------------

    def _add(self, name: int, parent: int, text: bytes, start: int, key: int, bit: int) -> int:
        after = _NONE
        if parent != _NONE:
            after = self._child[parent]
        if self._free:
            block = self._free.pop()
            self._hash[block], self._key[block], self._parent[block] = name, key, parent
            self._child[block], self._next[block], self._prev[block] = _NONE, after, _NONE
            self._start[block], self._media[block], self._text[block] = start, bit, text
        else:
            block = len(self._text)
            self._hash.append(name)
            self._key.append(key)
            self._parent.append(parent)
            self._child.append(_NONE)
            self._next.append(after)
            self._prev.append(_NONE)
            self._start.append(start)
            self._media.append(bit)
            self._text.append(text)
        if parent != _NONE:
            self._child[parent] = block
            if after != _NONE:
                self._prev[after] = block
        self._numbers[name] = block
        return block

    def _hold(self, block: int, bit: int) -> None:
        self._media[block] |= bit
        self._spare.pop(block, None)

    def _offer(self, block: int) -> None:
        """Mark a block for dropping if no medium holds it and no block follows it."""
        if not self._media[block] and self._child[block] == _NONE:
            self._spare[block] = None

    def _has_room(self, parent: int) -> bool:
        """Whether there is room for one more block behind `parent`; drops a block if need be."""
        self._spare.pop(parent, None)
        if len(self._numbers) < self._cap:
            return True
        if not self._spare:
            self.dropped += 1
            if parent != _NONE:
                self._offer(parent)
            return False
        self._drop(next(iter(self._spare)))
        return True

    def _drop(self, block: int) -> None:
        del self._spare[block], self._numbers[self._hash[block]]
        self._inner.pop(block, None)
        parent, before, after = self._parent[block], self._prev[block], self._next[block]
        if after != _NONE:
            self._prev[after] = before
        if before != _NONE:
            self._next[before] = after
        elif parent != _NONE:
            self._child[parent] = after
            self._offer(parent)
        self._text[block] = b""
        self._free.append(block)


def _number(name: Hash) -> int:
    """A block's hash in 64 bits: as engines shorten theirs, so that both forms agree."""
    return name & _MASK if isinstance(name, int) else int.from_bytes(name[-8:], "big")


def _names(extra: Iterable[object], adapter: str | None) -> list[str] | None:
    """The names that a block's hash depends on, without the adapter's; None if it depends on more than names."""
    names = list(extra)
    if adapter is not None and names and names[0] == adapter:
        del names[0]
    return [str(name) for name in names] if all(isinstance(name, str) for name in names) else None


def _is_plain(extra: object, adapter: str | None, *, is_root: bool) -> bool:
    """Whether a block's KV depends on tokens, adapter and, in a text's first block, the salt alone."""
    names = _names(extra, adapter) if isinstance(extra, list | tuple) else None
    return names is not None and len(names) <= (1 if is_root else 0)
