"""What was marked on each chunk in a bucket, one small object a chunk, and which of the chunk's copies are alive.

    object = [ xxh3-64 of the rest 8 | life 16 | marks, each [ bytes 2 | mark ] ]       none: life is zeros, no marks

One object that is replaced on condition that it is still the one that was read, rather than an object a mark: it is
read with one GET by its name, where a LIST costs twelve times as much and takes longer; two that mark the same chunk in
the same moment are rare, and the slower one reads again. And the life stands beside the marks: a chunk can be in
several objects (texts that part in the middle of a segment share its beginning), of which nobody knows all. They hold
the life that the chunk had when it was put. Deleting the chunk gives it another life, without marks, in the same write:
all its copies are dead from then on, and none is alive without its marks.
"""

import os
import struct
from collections.abc import Iterable
from typing import NamedTuple

import xxhash

from hotspan.l2.s3_bucket import Bucket
from hotspan.l2.segments import LIFE_BYTES

_CHECK_BYTES = 8
_SIZE = struct.Struct("<H")
_MOST_TRIES = 32


class Marks(NamedTuple):
    """What was marked on a chunk in its present life."""

    life: bytes
    marks: frozenset[bytes]


class MarkBook:
    """The marks of one bucket. Methods block for a request or two, and raise OSError."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def read(self, path: str) -> Marks:
        """The marks in an object."""
        blob = self._bucket.read(path)
        return _unpacked(None if blob is None else bytes(blob.data))

    def add(self, path: str, marks: Iterable[bytes]) -> Marks:
        """Add marks to those that are there; returns all."""
        for _ in range(_MOST_TRIES):
            blob = self._bucket.read(path)
            there = _unpacked(None if blob is None else bytes(blob.data))
            joined = there._replace(marks=there.marks.union(marks))
            if joined == there:
                return there
            if self._bucket.write(path, _packed(joined), over=None if blob is None else blob.e_tag) is not None:
                return joined
        raise OSError(f"{self._bucket.url}: others changed {path} each time a mark was to be added to it")

    def renew(self, path: str) -> None:
        """Begin another life, without marks."""
        self._bucket.overwrite(path, _packed(Marks(os.urandom(LIFE_BYTES), frozenset())))


def _packed(marks: Marks) -> bytes:
    body = marks.life + b"".join(_SIZE.pack(len(mark)) + mark for mark in sorted(marks.marks))
    return xxhash.xxh3_64_digest(body) + body


def _unpacked(data: bytes | None) -> Marks:
    """The marks in an object. Bytes that are none are a life of their own: no copy has it, and new ones can."""
    if data is None:
        return Marks(bytes(LIFE_BYTES), frozenset())
    check, body = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
    if len(body) < LIFE_BYTES or xxhash.xxh3_64_digest(body) != check:
        return Marks(xxhash.xxh3_128_digest(data), frozenset())
    marks, at = set(), LIFE_BYTES
    while at < len(body):
        (size,) = _SIZE.unpack_from(body, at)
        at += _SIZE.size + size
        marks.add(body[at - size : at])
    return Marks(body[:LIFE_BYTES], frozenset(marks))
