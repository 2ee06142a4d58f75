"""Under which names an L2 was written, in a blob beside its objects: a start that finds nothing there says why.

What is kept is that of a disk's directory (tiers/written_under.py). Replicas that start at the same moment may
overwrite each other's: the next start then knows of one name less.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from hotspan.core.threads import start
from hotspan.l2.base import ObjectStore
from hotspan.l2.blobs import Part
from hotspan.l2.objects import BlobStore
from hotspan.tiers.written_under import MAX_BYTES, Name, difference, pack_names, parse_names

logger = logging.getLogger(__name__)

NAMES = "names/written"
"""The blob."""

AGAIN_S = 10.0
"""Between two tries to reach the store."""

_READS = 3
"""Of a store that can be read, and not be written each time, as a copy that is read-only."""


@runtime_checkable
class NamesPlace(Protocol):
    """Blobs among which one may be written anew."""

    def read(self, parts: Sequence[Part]) -> list[bytes | None]:
        """As Blobs says."""
        ...

    def overwrite(self, name: str, data: bytes) -> None:
        """Write a blob, whatever is there."""
        ...


class StoreNames:
    """Says once in the log if a store was written under other names alone, and adds this one's, on a thread of its own.

    A store that can't be reached is tried again until `close`; one that can be read and not be written is left as it is
    after some tries. The start of an engine waits for neither.

    connect: opens a connection, which is closed here.
    """

    def __init__(self, connect: Callable[[], ObjectStore], own: Name, where: str) -> None:
        self._connect = connect
        self._own = own
        self._where = where
        self._reads = 0
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin."""
        self._thread = start("l2-names", self._run)

    def close(self) -> None:
        """Try no more. Blocks: for a call that is under way, at most a second."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(1.0)

    def note(self, place: NamesPlace) -> None:
        """Read, say and write. Raises: OSError for a store that can't be reached, or can't be written now."""
        (data,) = place.read([Part(NAMES, MAX_BYTES + 1)])
        known = parse_names(data)
        self._reads += 1
        told = difference(self._own, known) if self._reads == 1 else None
        if told is not None:
            logger.warning(
                "l2_written_under_other_names l2=%s: nothing that it holds is found now; what differs: %s",
                self._where,
                told,
            )
        if (packed := pack_names(self._own, known)) != data:
            place.overwrite(NAMES, packed)

    def _run(self) -> None:
        store = self._connect()
        try:
            place = store.blobs if isinstance(store, BlobStore) else None
            while isinstance(place, NamesPlace) and not self._is_noted(place):
                if self._ending.wait(AGAIN_S):
                    return
        finally:
            store.close()

    def _is_noted(self, place: NamesPlace) -> bool:
        """Whether there is nothing left to do. That a store can't be reached is said by who follows its log."""
        try:
            self.note(place)
        except OSError as error:
            if self._reads < _READS:
                return False
            logger.warning("l2_names_not_written l2=%s error=%s", self._where, str(error))
        return True
