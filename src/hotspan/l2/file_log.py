"""The log of generations in a directory that replicas share.

    epochs/NUMBER             JSON: the epoch and above what its generations are; the highest number holds
    log/EPOCH/GENERATION      JSON: one entry; generations of an epoch have no gaps
    replicas/r-NAME           JSON: how far a replica has read, and until when it counts as alive

Names are taken by one writer only (l2/shared_files.py), so that of several who append each gets a generation
of its own, and of several who find that entries were lost one begins the next epoch.

On NFS, what another machine wrote is seen as late as the mount caches names and attributes (`actimeo`): mount with
`actimeo=1` or less, or an invalidation takes that long to be read.
"""

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from hotspan.core.clock import Clock
from hotspan.core.errors import MALFORMED
from hotspan.core.scopes import scopes_to_json
from hotspan.core.terms import Scope
from hotspan.l2.base import LogPage, SharedInvalidation, is_lost, read_entry
from hotspan.l2.shared_files import Calls, SharedFiles, Turn
from hotspan.l2.tree import is_gone

EPOCHS, LOG, REPLICAS = "epochs", "log", "replicas"

_FORGOTTEN_S = 3600.0
"""After which the file of a replica that is not alive is deleted."""

_MOST_GENERATION = 1 << 63
"""Generations are times in milliseconds, or a little more; what claims another one is damaged."""

_LOOKS = 3
"""At a log one of whose entries can't be read: another replica may be trimming it."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """number: of its file. floor: its generations are above it; of the log until entries are trimmed."""

    number: int
    name: bytes
    floor: int


@dataclass(frozen=True, slots=True)
class _Known:
    """How a log ended when it was last listed."""

    epoch: bytes
    newest: int
    floor: int


class FileEpochs:
    """Which epoch a directory is in. Methods raise OSError."""

    def __init__(self, files: SharedFiles, clock: Clock) -> None:
        self._files = files
        self._clock = clock

    def current(self, turn: Turn) -> Epoch:
        """The epoch that holds; the first one begins here."""
        while True:
            turn.step()
            number = max(_numbers(self._files, Path(EPOCHS)), default=0)
            if number:
                epoch = _read_epoch(self._files, self._path(number), number)
                if epoch is not None:
                    return epoch
            self._begin(number + 1, 0, turn)

    def path_of(self, epoch: Epoch) -> Path:
        """Of its file, which is as old as it is."""
        return self._path(epoch.number)

    def end(self, epoch: Epoch, newest: int, turn: Turn) -> None:
        """Begin the next one, unless somebody has; its floor is above `newest`."""
        self._begin(epoch.number + 1, newest + 1, turn)

    def _begin(self, number: int, least: int, turn: Turn) -> None:
        body = {"epoch": secrets.token_hex(16), "floor": max(least, int(self._clock.unix() * 1000))}
        self._files.publish(self._path(number), [json.dumps(body).encode()], turn, is_durable=True)

    def _path(self, number: int) -> Path:
        return Path(EPOCHS, _named(number))


class FileLog:
    """A SharedLog. An acknowledged entry is on the disk of whoever serves the directory."""

    def __init__(self, calls: Calls, files: SharedFiles, epochs: FileEpochs, entries: int, clock: Clock) -> None:
        self._calls = calls
        self._files = files
        self._epochs = epochs
        self._entries = entries
        self._clock = clock
        self._known = _Known(b"", 0, 0)
        self._reported: dict[str, int] = {}
        self._report_s = 0.0  # when it is due again

    def append(self, scopes: Sequence[Scope], by: str) -> int:
        return self._calls.run(lambda turn: self._append({"by": by, "scope": scopes_to_json(scopes)}, turn))

    def read(self, after: int) -> LogPage:
        return self._calls.run(lambda turn: self._read(after, turn))

    def report(self, replica: str, generation: int, ttl_s: float) -> None:
        now_s = self._clock.unix()
        if self._reported.get(replica) == generation and now_s < self._report_s:
            return  # what it said holds for long enough
        body = {"replica": replica, "generation": generation, "until_s": now_s + ttl_s}
        self._calls.run(lambda turn: self._files.replace(self._report_of(replica), json.dumps(body).encode(), turn))
        self._reported, self._report_s = {replica: generation}, now_s + ttl_s / 4

    def forget(self, replica: str) -> None:
        self._reported = {}

        def remove(turn: Turn) -> None:
            self._files.unlink(self._report_of(replica))

        self._calls.run(remove)

    def replicas(self) -> dict[str, int]:
        return self._calls.run(self._alive)

    # -- inside ----------------------------------------------------------------------------------------------------

    def _append(self, body: Mapping[str, Any], turn: Turn) -> int:
        data = json.dumps(body, separators=(",", ":")).encode()
        while True:
            epoch = self._epochs.current(turn)
            path = self._files.publish_one(self._free(epoch, turn), [data], turn, is_durable=True)
            if path is not None and self._epochs.current(turn) == epoch:  # else nobody reads it there
                self._trim(epoch, int(path.name), turn)
                return int(path.name)

    def _free(self, epoch: Epoch, turn: Turn) -> Iterator[Path]:
        """Names for the next entry, until one of them is free: others append, too."""
        number = 0
        while True:
            number = self._newest(epoch, turn, number) + 1
            yield self._directory(epoch) / _named(number)

    def _newest(self, epoch: Epoch, turn: Turn, least: int = 0) -> int:
        """The generation of the newest entry, found without a list of them where one is known that is still there."""
        newest = max(least, self._known.newest)
        if epoch.name != self._known.epoch or not self._files.is_there(self._directory(epoch) / _named(newest)):
            return max(_numbers(self._files, self._directory(epoch)), default=epoch.floor)
        while self._files.is_there(self._directory(epoch) / _named(newest + 1)):
            turn.step()
            newest += 1
        return newest

    def _trim(self, epoch: Epoch, newest: int, turn: Turn) -> None:
        """Delete all but the newest entries, the oldest first: a gap would be a loss."""
        last = first = newest - self._entries
        while first > epoch.floor and self._files.is_there(self._directory(epoch) / _named(first)):
            turn.step()
            first -= 1
        for number in range(first + 1, last + 1):
            turn.step()
            self._files.unlink(self._directory(epoch) / _named(number))

    def _read(self, after: int, turn: Turn) -> LogPage:
        while True:
            epoch = self._epochs.current(turn)
            page = self._next(epoch, after, turn) or self._page(epoch, after, turn)
            if page is not None:
                return page
            newest = max(_numbers(self._files, self._directory(epoch)), default=epoch.floor)
            self._epochs.end(epoch, max(after, newest), turn)

    def _next(self, epoch: Epoch, after: int, turn: Turn) -> LogPage | None:
        """The page after the end as it was known, if it is still there: without listing all entries."""
        known, directory = self._known, self._directory(epoch)
        if (epoch.name, after) != (known.epoch, known.newest):
            return None
        if after != epoch.floor and not self._files.is_there(directory / _named(after)):
            return None
        entries: list[SharedInvalidation] = []
        while self._files.is_there(directory / _named(after + len(entries) + 1)):
            entry = self._entry(epoch, after + len(entries) + 1, turn)
            if entry is None:
                return None
            entries.append(entry)
        self._known = _Known(epoch.name, after + len(entries), known.floor)
        return LogPage(epoch.name, self._known.newest, known.floor, entries)

    def _page(self, epoch: Epoch, after: int, turn: Turn) -> LogPage | None:
        """None if entries were lost."""
        for _ in range(_LOOKS):
            turn.step()
            numbers = _numbers(self._files, self._directory(epoch))
            floor, newest = min(numbers, default=epoch.floor + 1) - 1, max(numbers, default=epoch.floor)
            if after > newest:
                return None
            wanted = range(max(after, floor) + 1, newest + 1)
            entries = [self._entry(epoch, number, turn) for number in wanted]
            there = [entry for entry in entries if entry is not None]
            if len(there) == len(wanted):
                self._known = _Known(epoch.name, newest, floor)
                return LogPage(epoch.name, newest, floor, there)
        return None

    def _entry(self, epoch: Epoch, number: int, turn: Turn) -> SharedInvalidation | None:
        """None if it is gone, or if not even its tenant can be read."""
        turn.step()
        entry = read_entry(number, _read_json(self._files, self._directory(epoch) / _named(number)))
        return None if is_lost(entry) else entry

    def _alive(self, turn: Turn) -> dict[str, int]:
        now_s = self._clock.unix()
        alive: dict[str, int] = {}
        for name in self._files.listed(Path(REPLICAS)):
            turn.step()
            path = Path(REPLICAS, name)
            body = _read_json(self._files, path)
            try:
                until_s = float(body["until_s"])
                if now_s < until_s:
                    alive[str(body["replica"])] = int(body["generation"])
            except MALFORMED:
                continue
            if now_s > until_s + _FORGOTTEN_S:
                self._files.unlink(path)
        return alive

    def _directory(self, epoch: Epoch) -> Path:
        return Path(LOG, epoch.name.hex())

    def _report_of(self, replica: str) -> Path:
        return Path(REPLICAS, f"r-{quote(replica, safe='')}")


def _named(number: int) -> str:
    return f"{number:020d}"


def _numbers(files: SharedFiles, directory: Path) -> list[int]:
    return [int(name) for name in files.listed(directory) if len(name) == 20 and name.isdecimal()]


def _read_epoch(files: SharedFiles, path: Path, number: int) -> Epoch | None:
    """None for a damaged one."""
    body = _read_json(files, path)
    try:
        name = bytes.fromhex(body["epoch"])
        floor = int(body["floor"])
        return Epoch(number, name, floor) if len(name) == 16 and 0 <= floor < _MOST_GENERATION else None
    except MALFORMED:
        return None


def _read_json(files: SharedFiles, path: Path) -> dict[str, Any]:
    """What a file says; nothing if it is gone or damaged."""
    try:
        body = json.loads(files.read(path))
    except OSError as error:
        if not is_gone(error):
            raise
        return {}
    except MALFORMED:
        return {}
    return body if isinstance(body, dict) else {}
