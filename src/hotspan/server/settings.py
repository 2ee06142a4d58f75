"""What the HTTP side of a server may be told."""

from dataclasses import dataclass
from typing import Literal

from hotspan.core.types import GIB, MIB

Compat = Literal["none", "lmi"]


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """The limits and the habits of one server.

    model_names:        names of the base model in paths and bodies; besides them a name is an adapter's.
    is_embedding:       the model makes embeddings: `inputs` asks for them.
    compat:             "lmi" answers 424 where LMI does (docs/http.md).
    sessions_path:      where sessions are; None has none.
    session_s:          how long a session lives.
    is_strict_sessions: an id that nobody created is an error, and not taken as it is.
    close_forgets:      closing a session also invalidates what the cache holds of it.
    job_queue_size:     requests in the engine at a time; more are refused. Half of them is divided between the
                        principals.
    max_request_bytes:  of one body.
    held_bytes:         of all bodies in memory; half of it is divided between the principals.
    principals:         how many there are: tenants, the administrator, and clients without a key.
    stall_s:            without a byte of a body.
    least_rate:         of a body, on average, in bytes/s; `stall_s` more is allowed.
    predict_timeout_s:  from admission to the last byte of the answer.
    head_s:             for a request's head, from its first byte (or the connection) on.
    deaf_s:             without a byte of the answer being read.
    idle_s:             between two requests of a connection.
    connections:        at a time; the one that waits longest without a request makes room for a new one. Bodies may
                        arrive on half of them, which is divided as `held_bytes` is.
    """

    model_names: tuple[str, ...] = ("lmi", "model")
    is_embedding: bool = False
    compat: Compat = "none"
    sessions_path: str | None = "/dev/shm/hotspan_sessions"
    session_s: float = 1200.0
    is_strict_sessions: bool = False
    close_forgets: bool = False
    job_queue_size: int = 1000
    max_request_bytes: int = 64 * MIB
    held_bytes: int = GIB
    principals: int = 2
    stall_s: float = 10.0
    least_rate: float = 1e5
    predict_timeout_s: float = 240.0
    head_s: float = 10.0
    deaf_s: float = 60.0
    idle_s: float = 5.0
    connections: int = 4096
