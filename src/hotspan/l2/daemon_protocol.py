"""The daemon protocol: messages over a Unix socket (SEQPACKET), values in shared memory.

    hello:   "HSPUNIX\\0" version 2, sizes of record, update and preamble 3 x 4
             -> status 1, version 2, segment bytes 8; and the segment's descriptor
    request: operation 1, n 2, n ids of leases that are over 8 each, body          -> status 1, body
    entry:   size 8, e 2, u 2, record 256, e x (offset 8, size 8), u x update 17             of an object, from DESCRIBE

Integers are little-endian, and nothing is padded. One request is in work on a connection. What a connection leased and
reserved ends with it; the bytes of a reservation are given out again only then, or after COMMIT or ABORT: until then
somebody may be writing there.
"""

import struct
from enum import IntEnum

from hotspan.l2.base import PREAMBLE_BYTES, UPDATE_BYTES
from hotspan.tiers.record import RECORD_BYTES

VERSION = 2
HELLO = struct.Struct("<8sHIII")
GREETING = struct.Struct("<BHQ")
REQUEST = struct.Struct("<BH")
LEASE_ID = struct.Struct("<Q")
ENTRY = struct.Struct(f"<QHH{RECORD_BYTES}s")
EXTENT = struct.Struct("<QQ")
FIND = struct.Struct("<I")  # ttl in ms, 0 for no lease; then keys
FOUND = struct.Struct("<Q")  # lease, 0 for none; then of each key a version 8, 0 if it is not there
DESCRIBED = struct.Struct("<H")  # n, of the first n keys; then n x version 8, n x length 2 (0: not there), the entries
RESERVE = struct.Struct("<32sQ")
USAGE = struct.Struct("<QQQ")
UPDATES = struct.Struct("<32sH")
LOG_ENTRY = struct.Struct("<Q16s")  # number, epoch
LOG_BEGIN = struct.Struct("<16sQ16s")  # epoch that is replaced, zeros for none; then the first entry
LOG_READ = struct.Struct("<QQ")  # number of the first entry, bytes of those entries that were read already
LOG_HEAD = struct.Struct("<Q16s?Q")  # of the oldest entry, and whether it has a body; bytes of all that were asked for
LOG_BODY = struct.Struct("<Q16sI")  # number, epoch, bytes of the body that follows

HELLO_MESSAGE = HELLO.pack(b"HSPUNIX\0", VERSION, RECORD_BYTES, UPDATE_BYTES, PREAMBLE_BYTES)
BUFFER_BYTES = 1 << 20
"""Of a socket, if the kernel allows it, and of what receives a message."""

MAX_KEYS = 512
"""In one FIND or DESCRIBE."""

CHANGE_BITS = 24
"""Of a version, which change when updates are added; versions that are alike above them are of the same bytes."""

MAX_RELEASES = 1000
"""In one request."""


class Operation(IntEnum):
    """What a request asks for. LOG_PART is followed by LOG_APPEND, with the rest of the body; reports are JSON."""

    FIND = 1
    DESCRIBE = 2
    RESERVE = 3
    COMMIT = 4
    ABORT = 5
    UPDATE = 6
    DELETE = 7
    USAGE = 8
    LOG_PART = 9
    LOG_APPEND = 10
    LOG_BEGIN = 11
    LOG_READ = 12
    LOG_REPORT = 13
    LOG_REPORTS = 14


class Status(IntEnum):
    """How it went."""

    OK = 0
    EXISTS = 1
    TOO_LARGE = 2
    NO_ROOM = 3
    BAD_REQUEST = 4
    """Not understood, or out of turn; the daemon answers nothing on this connection any more."""
