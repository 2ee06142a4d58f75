"""The log of invalidations in a bucket.

    log/epoch                          32 hex digits; another one begins another log
    log/{epoch}/pages/{generation}     entries from that generation on, [ xxh3-64 8 | JSON ]; the last page grows
    log/{epoch}/replicas/{name}        how far a replica has read, and until when it is alive

An entry is added by replacing the last page on condition that it is still the one that was read; when that is full, by
creating the next, whose name is the generation it begins with. So a generation is given once, and who reads after the
last one asks for one object. The oldest pages go when there are too many: the log then knows nothing of what is before
the first page that is left. A log without a page, or that ends before what somebody has read, was lost; another one
begins in its place.

A replica is alive by its own clock and dead by the reader's: clocks of replicas should differ by less than a second.
"""

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import xxhash

from hotspan.core.clock import Clock
from hotspan.core.errors import MALFORMED
from hotspan.core.scopes import scopes_to_json
from hotspan.core.terms import Scope
from hotspan.l2.base import LogPage, SharedInvalidation, read_entry
from hotspan.l2.s3_bucket import Blob, Bucket

logger = logging.getLogger(__name__)

_EPOCH = "log/epoch"
_EPOCH_BYTES = 16
_CHECK_BYTES = 8
_PAGE_ENTRIES = 256
_PAGE_BYTES = 256 << 10
_LONG_DEAD_S = 3600.0


class _Epoch(NamedTuple):
    """The name of a log, and the object that says it."""

    name: bytes
    blob: Blob


@dataclass(frozen=True, slots=True)
class _Page:
    """One page as it was read. first: the generation of its first entry, or of the one that will be."""

    first: int
    blob: Blob
    entries: tuple[SharedInvalidation, ...]

    @property
    def last(self) -> int:
        """The generation of its last entry, or that before its first."""
        return self.first + len(self.entries) - 1


@dataclass(frozen=True, slots=True)
class _Tail:
    """The end of a log: its last page. floor: of the log when its pages were listed."""

    epoch: bytes
    page: _Page
    floor: int

    @property
    def last(self) -> int:
        return self.page.last


@dataclass(frozen=True, slots=True)
class _Said:
    """How far a replica has read, and until when it is alive (Unix time)."""

    replica: str
    generation: int
    until_s: float


@dataclass(frozen=True, slots=True)
class _Report:
    """What a replica says. at_s: on the clock's monotonic time."""

    epoch: bytes
    generation: int
    ttl_s: float
    at_s: float

    def covers(self, later: "_Report") -> bool:
        """Whether a later one says nothing new."""
        is_same = (self.epoch, self.generation, self.ttl_s) == (later.epoch, later.generation, later.ttl_s)
        return is_same and later.at_s - self.at_s < self.ttl_s / 3


class S3Log:
    """A SharedLog under `log/` in a bucket, which keeps at least so many `entries`."""

    def __init__(self, bucket: Bucket, clock: Clock, entries: int) -> None:
        self._bucket = bucket
        self._clock = clock
        self._entries = entries
        self._page_entries = max(1, min(_PAGE_ENTRIES, entries // 4))
        self._epoch: _Epoch | None = None
        self._tail: _Tail | None = None
        self._reports: dict[str, _Report] = {}

    def epoch(self) -> bytes:
        """That of the log there is now; begins one where there is none. Blocks: for one request, or a few."""
        return self._current().name

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        until = self._bucket.until()
        return self._bucket.call(partial(self._append, tuple(scopes), by, until), until)

    def read(self, after: int) -> LogPage:
        """As SharedLog says. Where the log ends before `after` it has lost entries, and begins anew."""
        until = self._bucket.until()
        known = self._tail
        asked = self._bucket.begin(self.epoch)
        tail = self._bucket.call(partial(self._refreshed, known), until) if known is not None else None
        (epoch,) = self._bucket.results([asked], until)
        if tail is None or tail.epoch != epoch or tail.last < after:
            tail = self._bucket.call(partial(self._located, max(after, known.last if known is not None else 0)), until)
        self._tail = tail
        pages, floor = [tail.page], tail.floor
        if after < tail.page.first - 1:
            pages = [*self._older(tail, after, until), tail.page]
            floor = pages[0].first - 1
        entries = [entry for page in pages for entry in page.entries if entry.generation > after]
        return LogPage(tail.epoch, tail.last, floor, entries)

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        """As SharedLog says; what was just said is not said again."""
        report = _Report(self._epoch_name(), generation, ttl_s, self._clock.monotonic())
        last = self._reports.get(replica)
        if last is not None and last.covers(report):
            return
        body = {"replica": replica, "generation": generation, "until_s": self._clock.unix() + ttl_s}
        until = self._bucket.until()
        path = self._replica_path(replica, until)
        self._bucket.call(partial(self._bucket.overwrite, path, json.dumps(body).encode()), until)
        self._reports[replica] = replace(report, epoch=self._epoch_name())

    def forget(self, replica: str) -> None:
        self._reports.pop(replica, None)
        until = self._bucket.until()
        path = self._replica_path(replica, until)
        self._bucket.call(partial(self._bucket.delete, [path]), until)

    def replicas(self) -> dict[str, int]:
        until = self._bucket.until()
        directory = f"log/{self._bucket.call(self.epoch, until).hex()}/replicas"
        paths = self._bucket.call(partial(self._bucket.list, directory), until)
        said = self._bucket.each(self._said, paths, until)
        now_s = self._clock.unix()
        dead = [path for path, one in zip(paths, said, strict=True) if one and one.until_s < now_s - _LONG_DEAD_S]
        self._bucket.call(partial(self._bucket.delete, dead), until)
        return {one.replica: one.generation for one in said if one is not None and one.until_s > now_s}

    # -- inside: each call here blocks for a request or a few, on one of the bucket's threads ------------------------

    def _epoch_name(self) -> bytes:
        return b"" if self._epoch is None else self._epoch.name

    def _current(self) -> _Epoch:
        known = self._epoch
        blob = self._bucket.read_again(_EPOCH, None if known is None else known.blob) or self._begun(None)
        if known is None or blob is not known.blob:
            known = self._epoch = _Epoch(_name_in(blob), blob)
        if len(known.name) != _EPOCH_BYTES:
            raise OSError(f"{self._bucket.url}/{_EPOCH} is damaged: delete it, and the L2 begins anew")
        return known

    def _append(self, scopes: tuple[Scope, ...], by: str, until: float) -> int:
        tail = self._tail or self._located(0)
        while time.monotonic() < until:
            longer = self._with(tail, scopes, by)
            if longer is not None and self.epoch() == tail.epoch:
                self._tail = longer
                return longer.last
            # Somebody else was faster, or nobody reads this log any more.
            refreshed = self._refreshed(tail) if longer is None and self.epoch() == tail.epoch else None
            tail = refreshed or self._located(tail.last)
        raise TimeoutError(f"{self._bucket.url}: others wrote to the log all the time")

    def _with(self, tail: _Tail, scopes: tuple[Scope, ...], by: str) -> _Tail | None:
        """The log with one more entry; None if it has grown meanwhile."""
        page, entry = tail.page, SharedInvalidation(tail.last + 1, scopes, by)
        is_full = self._is_full(page)
        first, over = (entry.generation, None) if is_full else (page.first, page.blob.e_tag)
        entries = (entry,) if is_full else (*page.entries, entry)
        data = _packed(entries)
        e_tag = self._bucket.write(_page_path(tail.epoch, first), data, over=over)
        if e_tag is None:
            return None
        if is_full:
            self._trim(tail.epoch, entry.generation)
        return replace(tail, page=_Page(first, Blob(data, e_tag, len(data)), entries))

    def _is_full(self, page: _Page) -> bool:
        return len(page.entries) >= self._page_entries or page.blob.size >= _PAGE_BYTES

    def _trim(self, epoch: bytes, last: int) -> None:
        """Delete the pages that end before the newest entries that are kept."""
        with contextlib.suppress(OSError):  # the entry is written; the next page trims again
            firsts = self._firsts(epoch)
            old = [first for first, after in pairwise(firsts) if after - 1 <= last - self._entries]
            self._bucket.delete([_page_path(epoch, first) for first in old])

    def _located(self, least: int) -> _Tail:
        """The end of the log there is now; of one that begins in its place if that ends before `least`."""
        epoch = self._current()
        tail = self._found(epoch.name)
        if tail is None or tail.last < least:
            logger.warning("l2_log_begins_anew bucket=%s least=%d", self._bucket.url, least)
            self._begun(epoch.blob, least)
            tail = self._found(self.epoch())
        if tail is None:
            raise OSError(f"{self._bucket.url}: the log is lost, and another one could not be begun")
        return tail

    def _found(self, epoch: bytes) -> _Tail | None:
        """The end of a log; None if it has none."""
        firsts = self._firsts(epoch)
        page = self._page(epoch, firsts[-1]) if firsts else None
        return None if page is None else self._followed(_Tail(epoch, page, firsts[0] - 1))

    def _refreshed(self, tail: _Tail) -> _Tail | None:
        """The end of the same log now; None if that is not where it was, or is less than it was."""
        page = self._page(tail.epoch, tail.page.first, tail.page)
        return None if page is None or page.last < tail.last else self._followed(replace(tail, page=page))

    def _followed(self, tail: _Tail) -> _Tail:
        while self._is_full(tail.page) and (after := self._page(tail.epoch, tail.last + 1)) is not None:
            tail = replace(tail, page=after)
        return tail

    def _older(self, tail: _Tail, after: int, until: float) -> list[_Page]:
        """The pages before the last one that have entries above `after`, as far back as none is missing."""
        firsts = self._bucket.call(partial(self._firsts, tail.epoch), until)
        ends = [first - 1 for first in firsts[1:]]
        wanted = [first for first, end in zip(firsts, ends, strict=False) if after < end < tail.page.first]
        pages: list[_Page] = []
        behind = tail.page
        for page in reversed(self._bucket.each(partial(self._page, tail.epoch), wanted, until)):
            if page is None or page.last + 1 != behind.first:
                break
            pages.insert(0, page)
            behind = page
        return pages

    def _page(self, epoch: bytes, first: int, known: _Page | None = None) -> _Page | None:
        """The page that begins with `first`; `known` itself if it has not grown; None if it is not there."""
        blob = self._bucket.read_again(_page_path(epoch, first), known.blob if known is not None else None)
        if known is not None and blob is known.blob:
            return known
        if blob is None:
            return None
        entries = _entries(bytes(blob.data), first)
        if entries is None:
            raise OSError(
                f"{self._bucket.url}/{_page_path(epoch, first)} is damaged: nobody can tell what was invalidated. "
                f"Delete {_EPOCH}, and the L2 begins anew"
            )
        return _Page(first, blob, entries)

    def _firsts(self, epoch: bytes) -> list[int]:
        """Of the pages there are, in order."""
        return [int(path.rpartition("/")[2], 16) for path in self._bucket.list(f"log/{epoch.hex()}/pages")]

    def _begun(self, over: Blob | None, least: int = 0) -> Blob:
        """The epoch of a log that begins in the place of another; if others begin one, too, the first of them counts.

        Its generations are above `least`, and above those of a log whose generations nobody knows any more: each began
        with a time in milliseconds.
        """
        known = 0 if self._tail is None else self._tail.last
        epoch, floor = os.urandom(_EPOCH_BYTES), max(int(self._clock.unix() * 1000), least + 1, known + 1)
        self._bucket.write(_page_path(epoch, floor + 1), _packed(()))  # first: an epoch without a page is a lost log
        self._bucket.write(_EPOCH, epoch.hex().encode(), over=None if over is None else over.e_tag)
        blob = self._bucket.read(_EPOCH)
        if blob is None:
            raise OSError(f"{self._bucket.url}/{_EPOCH} was deleted as soon as it was written")
        return blob

    def _replica_path(self, replica: str, until: float) -> str:
        name = hashlib.sha256(replica.encode()).hexdigest()[:32]
        return f"log/{self._bucket.call(self.epoch, until).hex()}/replicas/{name}"

    def _said(self, path: str) -> _Said | None:
        blob = self._bucket.read(path)
        try:
            body = json.loads(bytes(blob.data)) if blob is not None else {}
            return _Said(str(body["replica"]), int(body["generation"]), float(body["until_s"]))
        except MALFORMED:
            return None  # gone, or nobody's


def _name_in(blob: Blob) -> bytes:
    try:
        return bytes.fromhex(bytes(blob.data).decode())
    except ValueError:
        return b""


def _page_path(epoch: bytes, first: int) -> str:
    return f"log/{epoch.hex()}/pages/{first:016x}"


def _packed(entries: Sequence[SharedInvalidation]) -> bytes:
    said = [{"scope": scopes_to_json(entry.scopes), "by": entry.by} for entry in entries]
    data = json.dumps(said, separators=(",", ":")).encode()
    return xxhash.xxh3_64_digest(data) + data


def _entries(data: bytes, first: int) -> tuple[SharedInvalidation, ...] | None:
    """The entries of a page that begins with generation `first`; None if it is none."""
    check, body = data[:_CHECK_BYTES], data[_CHECK_BYTES:]
    if xxhash.xxh3_64_digest(body) != check:
        return None
    try:
        said = json.loads(body)
    except MALFORMED:
        return None
    return tuple(read_entry(first + nth, one) for nth, one in enumerate(said)) if isinstance(said, list) else None
