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


class Owner(NamedTuple):
    """Whose texts a request's are. What two owners send has different names in every index of the router.

    tenant: to the replicas; "" is the default one, or one that is not known here.
    mark:   32 bytes of its name or of its credentials, the same in every router; b"" if nobody is told apart.
    """

    tenant: str = ""
    mark: bytes = b""


ANYBODY = Owner()


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, as far as the choice of a replica depends on it.

    keys:          of the prompt's pieces, root first, each with 64 bits.
    tokens:        of the prompt, estimated.
    piece_tokens:  that a piece stands for, estimated.
    answer_tokens: that are expected; 0 if nothing is known.
    session:       the name of its session; empty if it has none.
    tenant:        whose share of the queue it uses; empty if nobody is named.
    owner:         the mark of its owner, under which its session and its stored responses are known.
    response:      that it continues or reads, which only the replica that made it has; empty if none.
    sections:      of the prompt, which replicas that blend reuse at any place.
    model:         that its body names; empty if it names none.
    adapter:       that is named apart from it, as LMI's clients do.
    """

    keys: Sequence[int]
    tokens: int
    piece_tokens: float
    answer_tokens: int = 0
    session: bytes = b""
    tenant: str = ""
    owner: bytes = b""
    response: str = ""
    sections: Sequence[Section] = ()
    model: str = ""
    adapter: str = ""
