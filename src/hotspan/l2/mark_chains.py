"""Marks in a store whose objects never change and can't be listed: each chunk has a chain of objects of their own.

    <key>        the chunk
    <key>.m0     marks
    <key>.m1     those of m0, and more           who adds marks puts the next number, and if another was faster (409)
    <key>.m2     those of m1, and more           reads what that one wrote and puts the number after it

    marks = [ "HSHM" | number 2 | count 2 | key 32 ][ mark 17 ] * count [ xxh3-64 8 ]

Each object has all that the ones before it have, so that a reader needs the last one only. It finds it in a few steps:
m0, m1, m3, m7 ... until one is not there, then between the last two. Most chunks have no marks: one step.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from hotspan.core.deadline import Deadline
from hotspan.core.terms import MOST_LABELS, Terms
from hotspan.core.types import ChunkKey
from hotspan.l2.base import MARK_BYTES, marked, marks_of
from hotspan.l2.leases import HyperpodDaemon, Lease

MOST_MARKS = MOST_LABELS + 1
"""Objects in a chain; with so many of them a chunk is wild, whatever they say."""

_LABELS_UNTIL = 48
"""From this number on a chain says "wild" instead of labels, so that there is room for earlier expiries."""

_HEAD = struct.Struct("<4sHH32s")
_MAGIC = b"HSHM"
_CHECK_BYTES = 8
_MOST_BYTES = _HEAD.size + MOST_LABELS * MARK_BYTES + _CHECK_BYTES
(_WILD,) = marks_of(Terms(is_wild=True), 0)


@dataclass(frozen=True, slots=True)
class Chain:
    """What is known of a chain.

    last:    its highest number, -1 for a chain that is empty. missing: the lowest number known not to be there.
    marks:   what the last one says.
    """

    last: int = -1
    missing: int = MOST_MARKS
    marks: frozenset[bytes] = frozenset()

    @property
    def is_known(self) -> bool:
        """Whether nothing is left to ask."""
        return self.missing == self.last + 1

    @property
    def probe(self) -> int:
        """Which number to ask for next."""
        if self.missing == MOST_MARKS:
            return min(2 * self.last + 1 if self.last >= 0 else 0, MOST_MARKS - 1)
        return (self.last + self.missing) // 2

    def terms(self, of: Terms) -> Terms:
        """The terms of an object with this chain."""
        is_full = self.last == MOST_MARKS - 1
        return marked(of, [*self.marks, _WILD] if is_full else self.marks)

    def joined(self, marks: Sequence[bytes]) -> frozenset[bytes] | None:
        """What the next number has to say to add marks; None if there is nothing to add."""
        before = self.terms(Terms())
        after = marked(before, marks)
        if after == before:
            return None
        union = self.marks.union(mark if len(mark) == MARK_BYTES else _WILD for mark in marks)
        if len(union) > MOST_LABELS or self.last + 1 >= _LABELS_UNTIL:
            wild = replace(after, labels=frozenset(), is_wild=True)
            return frozenset(marks_of(wild, after.generation))
        return union


class MarkChains:
    """The marks of one daemon's chunks. Methods raise OSError."""

    def __init__(self, daemon: HyperpodDaemon) -> None:
        self._daemon = daemon

    def read(self, keys: Iterable[ChunkKey], deadline: Deadline) -> dict[ChunkKey, Chain | None]:
        """The chain of each key; None for one that can't be read, of which nobody knows what it forbids."""
        return self._followed(dict.fromkeys(keys, Chain()), deadline)

    def add(self, marks: Mapping[ChunkKey, Sequence[bytes]], deadline: Deadline) -> None:
        """Add marks to the chains of their keys, those that are not covered. Raises: OSError also if one is full."""
        chains = self._followed(dict.fromkeys(marks, Chain()), deadline)
        while chains:
            beaten = self._beaten(chains, marks, deadline)
            ahead = {key: Chain(chain.last, chain.last + 2, chain.marks) for key, chain in beaten.items()}
            chains = self._followed(ahead, deadline, hold=True)

    def delete(self, keys: Iterable[ChunkKey], deadline: Deadline) -> None:
        """Delete the chains, where the daemon can."""
        left = list(keys)
        for number in range(MOST_MARKS):
            were = self._daemon.delete_all([name_of(key, number) for key in left], deadline)
            left = [key for key, was in zip(left, were, strict=True) if was]

    # -- inside ----------------------------------------------------------------------------------------------------

    def _beaten(
        self, chains: Mapping[ChunkKey, Chain | None], marks: Mapping[ChunkKey, Sequence[bytes]], deadline: Deadline
    ) -> dict[ChunkKey, Chain]:
        """Put the next number of each chain that lacks marks; returns those where somebody else was faster."""
        lacking: dict[ChunkKey, Chain] = {}
        values = {}
        for key, chain in chains.items():
            if chain is None:
                raise OSError("a chunk's marks can't be read, so that none can be added")
            joined = chain.joined(marks[key])
            if joined is None:
                continue
            if chain.last + 1 == MOST_MARKS:
                raise OSError("a chunk has all the marks that it can have, and needs another expiry")
            lacking[key] = chain
            values[name_of(key, chain.last + 1)] = [_packed(key, chain.last + 1, joined)]
        stored = self._daemon.put_all(values, deadline)
        return {key: chain for (key, chain), won in zip(lacking.items(), stored, strict=True) if not won}

    def _followed(
        self, chains: Mapping[ChunkKey, Chain], deadline: Deadline, *, hold: bool = False
    ) -> dict[ChunkKey, Chain | None]:
        """The chains, asked for until their ends are known."""
        followed: dict[ChunkKey, Chain | None] = dict(chains)
        while asked := {key: chain for key, chain in followed.items() if chain is not None and not chain.is_known}:
            names = [name_of(key, chain.probe) for key, chain in asked.items()]
            leases = self._daemon.lease_all(names, deadline, hold=hold)
            try:
                for (key, chain), lease in zip(asked.items(), leases, strict=True):
                    followed[key] = self._extended(key, chain, lease)
            finally:
                self._daemon.release_all(leases)
        return followed

    def _extended(self, key: ChunkKey, chain: Chain, lease: Lease | None) -> Chain | None:
        """A chain after the answer for its probe; None if what is there can't be read."""
        if lease is None:
            return replace(chain, missing=chain.probe)
        if lease.size > _MOST_BYTES:
            return None
        data = bytearray(lease.size)
        if not self._daemon.read(lease, 0, [memoryview(data)]):
            return None
        marks = _unpacked(key, chain.probe, bytes(data))
        return None if marks is None else Chain(chain.probe, chain.missing, marks)


def name_of(key: ChunkKey, number: int | None = None) -> str:
    """What the daemon knows a chunk by, or a number of its chain."""
    return key.hex() if number is None else f"{key.hex()}.m{number}"


def _packed(key: ChunkKey, number: int, marks: frozenset[bytes]) -> bytes:
    body = _HEAD.pack(_MAGIC, number, len(marks), key) + b"".join(sorted(marks))
    return body + xxhash.xxh3_64_digest(body)


def _unpacked(key: ChunkKey, number: int, data: bytes) -> frozenset[bytes] | None:
    """The marks in an object, None if it is not the chain's."""
    body, check = data[:-_CHECK_BYTES], data[-_CHECK_BYTES:]
    count, rest = divmod(len(body) - _HEAD.size, MARK_BYTES)
    if count < 0 or rest or xxhash.xxh3_64_digest(body) != check:
        return None
    if body[: _HEAD.size] != _HEAD.pack(_MAGIC, number, count, key):
        return None
    return frozenset(body[at : at + MARK_BYTES] for at in range(_HEAD.size, len(body), MARK_BYTES))
