"""An L2 in an S3 bucket, where a request takes 10 to 100 ms and what counts is how many there are.

    chunks/{epoch}/{tenant}/{last chunk's key}    one segment of a tenant's chain (segments.py): a few chunks, one after
                                                  the other, in one object
    marks/{epoch}/{chunk's key}                   what was marked on a chunk, and its life (s3_marks.py)
    log/...                                       the log of invalidations (s3_log.py)

A chunk that is put waits in memory until its segment is complete, and what is left of a text behind its last whole
segment is not stored: at most a segment's chunks less one are computed again. Who shares the beginning of a segment
with a text that is stored needs that beginning in its own object; where this process knows in which object it is, it is
copied from there, otherwise the chunks must be put again.

S3 has no eviction: give the bucket a lifecycle rule for `chunks/`, and none for `marks/`, without which a deleted chunk
would live again. Its LIST and its conditional writes must be strongly consistent, as AWS's are.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import ConfigError
from hotspan.core.terms import Terms
from hotspan.core.types import ChunkKey
from hotspan.l2.base import Found, Landed, SharedLog, StoreUsage, marked, marks_of
from hotspan.l2.s3_bucket import Blob, Bucket, Data
from hotspan.l2.s3_log import S3Log
from hotspan.l2.s3_marks import MarkBook, Marks
from hotspan.l2.s3_settings import S3Settings
from hotspan.l2.segments import (
    INDEX_BYTES,
    MOST_CHUNKS,
    MOST_PLACE,
    ChainSegment,
    Cut,
    Entry,
    Part,
    Pending,
    follows,
    packed,
    read_index,
)
from hotspan.tiers.io import copy
from hotspan.tiers.record import Record

_FIRST_WAVE = 4
"""Segments of a text that are asked for at first: most texts are there from their root on, or not at all."""

_MOST_PLACED = 1 << 15


class _Placed(NamedTuple):
    """Where a chunk is."""

    segment: ChainSegment
    nth: int

    @property
    def entry(self) -> Entry:
        return self.segment.entries[self.nth]

    @property
    def record(self) -> Record:
        return self.entry.record


class _Written(NamedTuple):
    """segment: what is there now, if that is known. is_new: whether it was written just now."""

    segment: ChainSegment | None
    is_new: bool


class S3Store:
    """An ObjectStore at s3://BUCKET/PREFIX; it connects when it is first used.

    Raises: ConfigError from the constructor for settings that can't work.
    """

    def __init__(self, url: str, settings: S3Settings | None = None, clock: Clock | None = None) -> None:
        settings = settings or S3Settings()
        if not 1 <= settings.segment_chunks <= MOST_CHUNKS:
            raise ConfigError(f"segment_chunks is {settings.segment_chunks}: give 1 to {MOST_CHUNKS}")
        for name in ("timeout_s", "pending_bytes", "connections", "log_entries"):
            if getattr(settings, name) <= 0:
                raise ConfigError(f"{name} is {getattr(settings, name)}: give more than 0")
        self._bucket = Bucket(url, settings.client, settings.timeout_s, settings.connections)
        self._log = S3Log(self._bucket, clock or SystemClock(), settings.log_entries)
        self.log: SharedLog | None = self._log
        self._book = MarkBook(self._bucket)
        self._is_per_tenant = settings.is_per_tenant
        self._cut = Cut(settings.segment_chunks)
        self._lock = threading.Lock()
        self._epoch: bytes | None = None
        self._pending = Pending(self._cut, settings.pending_bytes)
        self._placed: OrderedDict[ChunkKey, _Placed] = OrderedDict()

    def find(self, keys: Sequence[ChunkKey], tenant: int = 0, *, is_chain: bool = True) -> list[Found | None]:
        """As ObjectStore says, of one chain from its root: of one KV cache group.

        tenant:   whose label the objects lie under.
        is_chain: False for a group whose chunks stand alone.

        A text that is not there at all costs a few requests, one that is a round trip more for each four times its
        length, and one for the marks.
        """
        until = self._bucket.until()
        epoch = self._epoch or self._current_epoch(until)
        checked = self._bucket.begin(self._log.epoch)
        segments = self._segments(self._directory(epoch, tenant), keys, is_chain, until)
        entries = [entry for segment in segments for entry in segment.entries]
        marks = self._bucket.each(
            lambda entry: self._book.read(self._marks_path(epoch, entry.record.key)), entries, until
        )
        alive = {
            entry.record.key: Found(entry.record, marked(entry.record.terms, said.marks))
            for entry, said in zip(entries, marks, strict=True)
            if entry.life == said.life
        }
        (now,) = self._bucket.results([checked], until)
        if now != epoch:
            self._turn_to(now)
            return [None] * len(keys)  # all there was is gone
        with self._lock:
            for segment in segments if self._epoch == epoch else ():
                self._place(segment, alive)
        return [alive.get(key) for key in keys]

    def get(self, found: Found, into: Sequence[memoryview], landed: Landed | None = None) -> bool:
        key, stamp = found.record.key, found.record.stamp
        size = sum(map(len, into))
        with self._lock:
            part, placed = self._pending.get(key), self._placed.get(key)
        if part is not None and part.record.stamp == stamp and len(part.frame) == size:
            copy(part.frame, into)
            return True
        if placed is None or placed.record.stamp != stamp or placed.entry.size != size:
            return False
        data = self._frame(placed, self._bucket.until())
        if data is None:
            return False
        copy(memoryview(data), into)
        return True

    def put(self, record: Record, frame: Sequence[memoryview]) -> bool:
        """As ObjectStore says; seen by others once its segment is complete, and by nobody if that does not happen."""
        if record.place > MOST_PLACE:
            return True
        until = self._bucket.until()
        epoch = self._current_epoch(until)
        with self._lock:
            is_waiting, placed = self._pending.get(record.key) is not None, self._placed.get(record.key)
        # A chunk that does not name its object can be in others, which nobody would tell the terms of this one.
        terms = Terms() if self._cut.ends(record) else record.terms
        life = self._bucket.call(partial(self._join, epoch, record.key, terms), until).life
        if is_waiting or (placed is not None and self._is_there(epoch, placed, until)):
            return False
        part = Part(record, life, b"".join(frame))
        with self._lock:
            if self._epoch != epoch:
                return True  # gone with all that was there
            if self._pending.get(record.key) is not None:
                return False
            self._pending.add(part)
            ends = self._pending.ends_after(part)
        try:
            are_new = [self._upload(epoch, end, until) for end in ends]
            for end, is_new in zip(ends, are_new, strict=True):
                if not is_new and end is not part:  # who put that one was told that it is new
                    self._bucket.call(partial(self._join, epoch, end.record.key, end.record.terms), until)
            return all(are_new)
        except OSError:
            with self._lock:
                self._pending.remove([record.key])
            raise

    def mark(self, marks: Mapping[ChunkKey, Sequence[bytes]]) -> None:
        until = self._bucket.until()
        epoch = self._current_epoch(until)
        self._bucket.each(lambda key: self._book.add(self._marks_path(epoch, key), marks[key]), marks, until)

    def delete(self, keys: Sequence[ChunkKey], tenant: int = 0) -> None:
        """As ObjectStore says. The whole segment goes, where this process knows in which one a chunk is.

        tenant: whose segments go that are named by one of the keys.
        """
        until = self._bucket.until()
        epoch = self._current_epoch(until)
        self._bucket.each(self._book.renew, [self._marks_path(epoch, key) for key in keys], until)
        paths = {_segment_path(self._directory(epoch, tenant), key) for key in keys}
        with self._lock:
            self._pending.remove(keys)
            for key in keys:
                if key in self._placed:
                    segment = self._placed[key].segment
                    paths.add(segment.path)
                    self._forget(segment)
        self._bucket.call(partial(self._bucket.delete, sorted(paths)), until)

    def usage(self) -> StoreUsage:
        """Nothing, for a bucket does not say; but that it can be reached."""
        self._current_epoch(self._bucket.until())
        return StoreUsage()

    def close(self) -> None:
        """Let go of connections, and of what waits for the rest of its segment. Blocks: for requests under way."""
        self._bucket.close()
        with self._lock:
            self._pending.clear()

    def check(self) -> None:
        """Raise AssertionError if the books do not agree."""
        with self._lock:
            self._pending.check()
            if any(placed.record.key != key for key, placed in self._placed.items()):
                raise AssertionError("a chunk is remembered under another's name")
            if len(self._placed) > _MOST_PLACED:
                raise AssertionError("too many chunks are remembered")

    # -- where things are ------------------------------------------------------------------------------------------

    def _current_epoch(self, until: float) -> bytes:
        epoch = self._bucket.call(self._log.epoch, until)
        self._turn_to(epoch)
        return epoch

    def _turn_to(self, epoch: bytes) -> None:
        """The log began anew, and so did all objects."""
        with self._lock:
            if epoch != self._epoch:
                self._epoch = epoch
                self._pending.clear()
                self._placed.clear()

    def _directory(self, epoch: bytes, tenant: int) -> str:
        return f"chunks/{epoch.hex()}/{tenant if self._is_per_tenant else 0:016x}"

    def _marks_path(self, epoch: bytes, key: ChunkKey) -> str:
        return f"marks/{epoch.hex()}/{key.hex()}"

    def _place(self, segment: ChainSegment, keys: Mapping[ChunkKey, object]) -> None:
        """Remember where those of `keys` are that a segment has."""
        for nth, key in enumerate(segment.keys):
            if key in keys:
                self._placed[key] = _Placed(segment, nth)
                self._placed.move_to_end(key)
        while len(self._placed) > _MOST_PLACED:
            self._placed.popitem(last=False)

    def _forget(self, segment: ChainSegment, first: int = 0) -> None:
        """Forget that a segment has its chunks from the `first` on."""
        for key in segment.keys[first:]:
            if key in self._placed and self._placed[key].segment.path == segment.path:
                del self._placed[key]

    # -- reading ---------------------------------------------------------------------------------------------------

    def _segments(self, directory: str, keys: Sequence[ChunkKey], is_chain: bool, until: float) -> list[ChainSegment]:
        """The segments that are there, up to the first of a chain that is not; in waves, each larger than the last."""
        step = self._cut.chunks if is_chain else 1
        asked = iter([keys[at : at + step] for at in range(0, len(keys) - step + 1, step)])
        wave = _FIRST_WAVE if is_chain else len(keys)
        found: list[ChainSegment] = []
        while some := list(islice(asked, wave)):
            read = self._bucket.each(partial(self._segment, directory), some, until)
            if is_chain and None in read:
                return found + [segment for segment in read[: read.index(None)] if segment is not None]
            found += [segment for segment in read if segment is not None]
            wave *= 4
        return found

    def _segment(self, directory: str, keys: Sequence[ChunkKey]) -> ChainSegment | None:
        """The segment of exactly these chunks, if it is there whole."""
        path = _segment_path(directory, keys[-1])
        blob = self._bucket.read(path, 0, INDEX_BYTES)
        entries = _entries(blob, keys)
        return None if blob is None or entries is None else ChainSegment(path, blob.e_tag, entries)

    def _frame(self, placed: _Placed, until: float) -> Data | None:
        """A chunk's frame as it is stored; None if its object is another one by now."""
        segment, entry = placed.segment, placed.entry
        blob = self._bucket.call(
            lambda: self._bucket.read(segment.path, entry.at, entry.at + entry.size, of=segment.e_tag), until
        )
        if blob is not None and len(blob.data) == entry.size:
            return blob.data
        with self._lock:
            self._forget(segment)
        return None

    def _is_there(self, epoch: bytes, placed: _Placed, until: float) -> bool:
        """Whether a chunk is still where it was, and it and what it stands on in its segment are alive."""
        segment = placed.segment
        entries = segment.entries[: placed.nth + 1]
        alive = self._bucket.each(partial(self._is_alive, epoch), entries, until)
        dead = alive.index(False) if False in alive else len(alive)
        if dead == len(alive):
            there = self._bucket.call(lambda: self._bucket.read(segment.path, 0, 1, of=segment.e_tag), until)
            if there is not None:
                return True
            dead = 0
        with self._lock:
            self._forget(segment, dead)
        return False

    def _is_alive(self, epoch: bytes, entry: Entry) -> bool:
        """Whether a chunk was not deleted since it was put."""
        return self._book.read(self._marks_path(epoch, entry.record.key)).life == entry.life

    # -- writing ---------------------------------------------------------------------------------------------------

    def _join(self, epoch: bytes, key: ChunkKey, terms: Terms) -> Marks:
        """Mark a chunk with the terms that somebody put it on; what is marked on it now."""
        return self._book.add(self._marks_path(epoch, key), marks_of(terms, terms.generation))

    def _upload(self, epoch: bytes, end: Part, until: float) -> bool:
        """Write the segment that ends with `end`, if all of it is known. False if it is in the bucket already."""
        with self._lock:
            run = self._run(end)
        parts = [one if isinstance(one, Part) else self._copied(one, until) for one in run]
        whole = [part for part in parts if part is not None]
        if not whole or len(whole) < len(parts):
            return True  # it waits
        written = self._bucket.call(partial(self._write, epoch, whole), until)
        keys = [part.record.key for part in whole]
        with self._lock:
            self._pending.remove(keys)
            if written.segment is not None and self._epoch == epoch:
                self._place(written.segment, dict.fromkeys(keys))
        return written.is_new

    def _run(self, end: Part) -> list[Part | _Placed]:
        """The chunks of the segment that ends with `end`, each waiting or stored; nothing if one is neither."""
        run: list[Part | _Placed] = [end]
        while not self._cut.begins(run[0].record):
            after = run[0].record
            parent = after.parent or ChunkKey(b"")
            before = self._pending.get(parent) or self._placed.get(parent)
            if before is None or not follows(after, before.record) or not self._is_one_owner(after, before.record):
                return []
            run.insert(0, before)
        return run

    def _is_one_owner(self, one: Record, other: Record) -> bool:
        return not self._is_per_tenant or one.terms.tenant == other.terms.tenant

    def _copied(self, placed: _Placed, until: float) -> Part | None:
        data = self._frame(placed, until)
        return None if data is None else Part(placed.record, placed.entry.life, bytes(data))

    def _write(self, epoch: bytes, parts: Sequence[Part]) -> _Written:
        """Write an object, if there is none.

        Asked for first: a conditional write is refused only after all its bytes were sent. What is there in its place
        and is not alive, or something else, is replaced.
        """
        directory, keys = self._directory(epoch, parts[-1].record.terms.tenant), [part.record.key for part in parts]
        path = _segment_path(directory, keys[-1])
        there = self._bucket.read(path, 0, INDEX_BYTES)
        entries = _entries(there, keys)
        if there is not None and entries is not None and all(self._is_alive(epoch, entry) for entry in entries):
            return _Written(ChainSegment(path, there.e_tag, entries), False)
        buffers, entries = packed(parts)
        e_tag = self._bucket.write(path, buffers, over=None if there is None else there.e_tag)
        if e_tag is None:  # somebody else was faster
            return _Written(self._segment(directory, keys), False)
        return _Written(ChainSegment(path, e_tag, entries), True)


def _segment_path(directory: str, key: ChunkKey) -> str:
    return f"{directory}/{key.hex()}"


def _entries(blob: Blob | None, keys: Sequence[ChunkKey]) -> tuple[Entry, ...] | None:
    """What an object's index says; None if that is not an object of exactly these chunks."""
    entries = None if blob is None else read_index(bytes(blob.data), blob.size)
    return entries if entries is not None and [entry.record.key for entry in entries] == list(keys) else None
