"""What a shared store may state of sizes and numbers, whatever back end it is: of each item, of how many, of their sum.

Whoever may write a store may state anything. What exceeds these bounds cannot be understood: a chunk is a miss, a
report is none, of a log the newest part that fits counts. Nothing is read to its end to find that out.
"""

from typing import TypeVar

from hotspan.core.types import MIB

MAX_ENTRY_BYTES = 4 << 20
"""Of an entry's body: about 60,000 keys."""

MAX_LOG_ENTRIES = 1 << 17
"""Of a log, that one reading takes: twice as many as it keeps."""

MAX_LOG_BYTES = 128 * MIB
"""Of these entries' bodies together."""

MAX_LOG_NAMES = 4 * MAX_LOG_ENTRIES
"""Of what lies where a log of small blobs has its entries."""

MAX_EPOCHS = 1 << 16
MAX_EPOCH = 1 << 32
"""The highest number of an epoch; they are counted from 1 on."""

MAX_REPORTS = 4096
"""Replicas of one log that reported within the last hour."""

MAX_REPORT_BYTES = 2048
"""Of what one replica reports, with its name."""

MAX_REPORT_S = 3600.0
"""How far ahead a replica may say that it is alive."""

MAX_OBJECTS = 1 << 20
"""In one look at all that a directory holds."""

MAX_USAGE = 1 << 62
"""Of any figure that a store gives of itself."""

MAX_REASON = 200
"""Characters of what a store gives as the reason of an error."""

Figure = TypeVar("Figure", int, int | None)

_LEAST_MS = 1_700_000_000_000  # a clock that was never set must not make honest logs dishonest


def is_honest(generation: int, now_s: float) -> bool:
    """Whether a log can have come so far: it begins at the time of day in ms, and counts entries from there on.

    Twice the time leaves two entries per millisecond since 1970. The bound moves on, so that no entry stands at the end
    of all numbers.
    """
    return 0 <= generation <= 2 * max(int(now_s * 1000), _LEAST_MS)


def usage_figure(said: Figure) -> Figure:
    """A figure that a store gives of itself; 0 for none that can be. None if it gives none."""
    return said if said is None or 0 <= said <= MAX_USAGE else type(said)()


def reason(error: BaseException) -> str:
    """What a store gave as the reason of an error, as long as it may be in a message."""
    return str(error)[:MAX_REASON]
