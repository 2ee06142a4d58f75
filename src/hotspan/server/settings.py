"""What the HTTP side of a server may be told."""

from dataclasses import dataclass
from typing import Literal

from hotspan.http.connections import HttpLimits

Compat = Literal["none", "lmi"]


@dataclass(frozen=True, slots=True)
class HttpSettings(HttpLimits):
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
    predict_timeout_s:  from admission to the last byte of the answer.
    """

    model_names: tuple[str, ...] = ("lmi", "model")
    is_embedding: bool = False
    compat: Compat = "none"
    sessions_path: str | None = "/dev/shm/hotspan_sessions"
    session_s: float = 1200.0
    is_strict_sessions: bool = False
    close_forgets: bool = False
    job_queue_size: int = 1000
    predict_timeout_s: float = 240.0
