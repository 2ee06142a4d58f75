"""Types that the parts of the router share.

A prompt is compared as text, not as tokens: its rendered bytes in pieces of 512, each named by a chained hash. What a
replica holds, a request asks for and a trace replays are names of this one kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from hotspan.router.sections import Section

PIECE_BYTES = 512
"""About 128 tokens. A prompt's end that fills no piece is not compared."""


class Strategy(StrEnum):
    """How a replica is chosen; the names are those that platforms have for it."""

    AUTO = "auto"
    SESSION = "session"
    PREFIXAWARE = "prefixaware"
    KVAWARE = "kvaware"
    ROUNDROBIN = "roundrobin"


class Medium(IntEnum):
    """Where a replica holds a piece, fastest first. L2 is what all replicas share."""

    GPU = 0
    RAM = 1
    DISK = 2
    L2 = 3


class Held(NamedTuple):
    """Number of a prompt's pieces, from its root, that a replica has in each medium or in a faster one."""

    gpu: int = 0
    ram: int = 0
    disk: int = 0
    l2: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as the choice of a replica depends on it.

    keys:          of the prompt's pieces, root first, each with 64 bits.
    tokens:        of the prompt, estimated.
    piece_tokens:  that a piece stands for, estimated.
    answer_tokens: that are expected; 0 if nothing is known.
    session:       the name of its session; empty if it has none.
    tenant:        whose it is; empty if nobody is named.
    response:      that it continues or reads, which only the replica that made it has; empty if none.
    sections:      of the prompt, which replicas that blend reuse at any place.
    model:         that its body names; empty if it names none.
    """

    keys: Sequence[int]
    tokens: int
    piece_tokens: float
    answer_tokens: int = 0
    session: bytes = b""
    tenant: str = ""
    response: str = ""
    sections: Sequence[Section] = ()
    model: str = ""
