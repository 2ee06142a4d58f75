"""How far a replica has done what the shared log says, beside its disk tier: a file of a few bytes."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hotspan.core.errors import MALFORMED
from hotspan.core.private import write_whole
from hotspan.l2 import bounds
from hotspan.l2.base import LogPosition
from hotspan.tiers.base import AllDurable, Durable
from hotspan.tiers.directory import POSITION_FILE

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096


def read_position(directory: Path) -> LogPosition | None:
    """What `write_position` wrote last; None if that can't be told: then nothing in the directory can be trusted."""
    try:
        with (directory / POSITION_FILE).open("rb") as file:
            said = json.loads(file.read(_MAX_BYTES))
        position = LogPosition(bytes.fromhex(said["epoch"]), int(said["generation"]), bytes.fromhex(said["check"]))
    except (OSError, *MALFORMED):
        return None
    return position if bounds.is_honest(position.generation, time.time()) else None


def write_position(directory: Path, position: LogPosition) -> bool:
    """Whole or not at all. False if the disk does not take it: the next start will do more than it needs to."""
    said = {"epoch": position.epoch.hex(), "generation": position.generation, "check": position.check.hex()}
    try:
        write_whole(directory / POSITION_FILE, json.dumps(said).encode())
    except OSError as error:
        logger.warning("l2_position_not_written path=%s error=%s", directory, str(error))
        return False
    return True


class PositionKeeper:
    """Writes down how far the log was followed, once all that it said up to there is durable.

    What once could not be made durable is not passed over: then nothing more is written, and the next start does again
    what it said.
    """

    def __init__(self, directory: Path, submit: Callable[[Callable[[], object]], object]) -> None:
        """submit: runs something on another thread."""
        self._directory = directory
        self._submit = submit
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._latest: LogPosition | None = None
        self._durable: LogPosition | None = None  # the newest up to which all is durable
        self._written: LogPosition | None = None
        self._undone = 0
        self._is_behind = False

    def follow(self, position: LogPosition, scopes: int) -> Durable:
        """What each of so many invalidations, which lead up to `position`, is to tell when it is durable."""
        with self._lock:
            if position == self._latest and not scopes:
                return lambda done: None
            self._latest = position
            self._undone += 1
        return AllDurable(scopes, self._ended)

    def _ended(self, done: bool) -> None:
        with self._lock:
            self._undone -= 1
            self._is_behind |= not done
            position = self._latest
            if self._undone or self._is_behind or position is None:
                return
            self._durable = position
        self._submit(self._write)

    def _write(self) -> None:
        """Write the newest position that may be; whoever else writes waits for that, and finds it done."""
        with self._writing:
            with self._lock:
                position = self._durable
            if position is not None and position != self._written and write_position(self._directory, position):
                self._written = position
