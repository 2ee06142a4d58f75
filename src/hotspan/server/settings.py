"""What the HTTP side of a server may be told."""

from dataclasses import dataclass
from pathlib import Path

from hotspan.config.server_settings import Compat
from hotspan.http.connections import HttpLimits

LMI_NAMES = ("lmi", "model")
"""What LMI calls any base model; the engine does not know it by these names."""


@dataclass(frozen=True, slots=True)
class HttpSettings(HttpLimits):
    """The limits and the habits of one server. What is not explained here is an option of config/server_settings.py.

    model_names:        names of the base model in paths and bodies; besides them a name is an adapter's.
    is_embedding:       the model makes embeddings: `inputs` asks for them.
    job_queue_size:     requests in the engine at a time; more are refused. Half of them is divided between the
                        principals.
    predict_timeout_s:  from admission to the last byte of the answer.
    """

    model_names: tuple[str, ...] = LMI_NAMES
    is_embedding: bool = False
    compat: Compat = "none"
    no_sessions: bool = False
    sessions_path: Path = Path("/dev/shm/hotspan_sessions")
    session_expiry_s: float = 1200.0
    strict_sessions: bool = False
    forget_closed_sessions: bool = False
    job_queue_size: int = 1000
    predict_timeout_s: float = 240.0
