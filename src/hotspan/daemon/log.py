"""The entries of the log that all replicas of a node share (l2/log.py), in memory, and in a file if there is a disk.

    file: [ entries, metadata of chunks that are not here (daemon/metadata.py) ][ what was added since ] ...

Each write is one object of the file (tiers/log.py), so that a power loss tears the last one at most. The log lives as
long as the objects do: a daemon that starts again has neither, or finds both on its disk.
"""

import logging
import threading
from collections import OrderedDict, deque
from itertools import islice, pairwise

from hotspan.core.clock import Clock, SystemClock
from hotspan.core.errors import MALFORMED
from hotspan.core.types import MIB
from hotspan.daemon.metadata import AbsentMetadata
from hotspan.l2 import bounds
from hotspan.l2.blobs import Entry, Stretch
from hotspan.tiers.log import LogFile

logger = logging.getLogger(__name__)

MAX_ENTRIES = 1 << 16
MAX_BYTES = 64 * MIB
MAX_REPLICAS = 512
MAX_NAME = 200
"""Characters in the name of a replica."""

_MAX_REPORT_BYTES = 1024
_SLACK_BYTES = 16 * MIB
"""By how much the file may exceed twice what the entries take before it is written anew."""


class NodeLog:
    """A LogMedium. It keeps the newest `max_entries` entries, and of these the newest `max_bytes`.

    file:     where entries are kept (`write`), and found.
    metadata: that is kept there, too; cleared if the file has no log that can be trusted.
    Raises: ValueError for reports without measure; OSError from the constructor, if the file can't be read.
    """

    def __init__(
        self,
        clock: Clock | None = None,
        max_entries: int = MAX_ENTRIES,
        max_bytes: int = MAX_BYTES,
        file: LogFile | None = None,
        metadata: AbsentMetadata | None = None,
    ) -> None:
        self._clock = clock or SystemClock()
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._reports: OrderedDict[str, bytes] = OrderedDict()
        self._file = file
        self._metadata = metadata or AbsentMetadata(self._clock, is_kept=file is not None)
        self._lock = threading.Lock()
        self._unwritten: list[Entry] = []
        self._is_outdated = file is not None and not self._go_on(file)  # the file: it is to be written anew

    def __len__(self) -> int:
        """Entries, without the one with which it begins."""
        return sum(bool(entry.body) for entry in islice(self._entries, 1)) + max(0, len(self._entries) - 1)

    @property
    def oldest(self) -> Entry | None:
        """The first entry that was not dropped; None if there is no log."""
        return self._entries[0] if self._entries else None

    def read(self, first: int) -> Stretch | None:
        if not self._entries:
            return None
        oldest = self._entries[0]
        return Stretch(oldest, list(islice(self._entries, max(0, first - oldest.number), None)))

    def append(self, entry: Entry, keep: int = MAX_ENTRIES) -> bool:
        if not self._entries:
            return False
        newest = self._entries[-1]
        if (entry.number, entry.epoch) != (newest.number + 1, newest.epoch):
            return False
        with self._lock:
            self._keep(entry)
            if self._file is not None:
                self._unwritten.append(entry)
        return True

    def is_used(self) -> bool:
        return bool(self._entries or self._reports)

    def begin(self, over: bytes, entry: Entry) -> None:
        if (self._entries[-1].epoch if self._entries else b"") != over:
            return
        with self._lock:
            self._entries.clear()
            self._bytes = 0
            self._keep(entry)
            self._is_outdated = True

    def write_report(self, replica: str, data: bytes | None) -> None:
        if not 0 < len(replica) <= MAX_NAME or len(data or b"") > _MAX_REPORT_BYTES:
            raise ValueError(f"a replica's name has 1 to {MAX_NAME} characters, its report {_MAX_REPORT_BYTES} bytes")
        self._reports.pop(replica, None)
        if data is not None:
            self._reports[replica] = data
        while len(self._reports) > MAX_REPLICAS:
            self._reports.popitem(last=False)

    def read_reports(self) -> dict[str, bytes]:
        return dict(self._reports)

    def unix(self) -> float:
        return self._clock.unix()

    def write(self) -> None:
        """Have in the file, durably, what was appended so far; to be called from one other thread. Raises: OSError.

        If the file can't be written it is emptied instead: the next start then has no log, and nothing comes back.
        """
        if self._file is None:
            return
        with self._lock:
            needed = self._bytes + self._metadata.packed_bytes
            rewrites = self._is_outdated or self._file.bytes > 2 * needed + _SLACK_BYTES
            entries = list(self._entries if rewrites else self._unwritten)
            self._unwritten, self._is_outdated = [], False
        metadata = self._metadata.all() if rewrites else self._metadata.changes()
        body = {"entries": list(map(_packed, entries)), "metadata": metadata}
        try:
            if rewrites:
                self._file.rewrite([body])
            elif entries or metadata:
                self._file.add([body])
        except OSError as error:
            self._is_outdated = True
            logger.warning("daemon_log_not_written error=%s: a restart would begin with no log", str(error))
            self._file.clear()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _go_on(self, file: LogFile) -> bool:
        """Take over what an earlier daemon wrote; False if that is nothing, or can't be trusted to be all."""
        bodies, is_whole = file.bodies(drops_torn=True)
        try:
            for body in bodies:
                for number, epoch, data in body["entries"]:
                    self._keep(Entry(int(number), bytes.fromhex(epoch), str(data).encode("latin-1")))
                self._metadata.load(body["metadata"])
        except MALFORMED:
            is_whole = False
        if any((two.number, two.epoch) != (one.number + 1, one.epoch) for one, two in pairwise(self._entries)):
            is_whole = False
        if not all(bounds.is_honest(entry.number, self._clock.unix()) for entry in islice(reversed(self._entries), 1)):
            is_whole = False
        if not is_whole:
            logger.warning("daemon_log_lost: what was invalidated is not known, hotspan's own objects are forgotten")
            self._entries.clear()
        if not self._entries:
            self._metadata.clear()
        return bool(self._entries)

    def _keep(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._bytes += len(entry.body)
        while len(self._entries) > self._max_entries + 1 or (self._bytes > self._max_bytes and len(self._entries) > 1):
            self._bytes -= len(self._entries.popleft().body)


def _packed(entry: Entry) -> tuple[int, str, str]:
    return entry.number, entry.epoch.hex(), entry.body.decode("latin-1")
