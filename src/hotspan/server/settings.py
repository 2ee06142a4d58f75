"""What the HTTP side of a server may be told."""

from dataclasses import dataclass
from pathlib import Path

from hotspan.config.server_settings import Compat, ServerSettings
from hotspan.http.connections import HttpLimits

LMI_NAMES = ("lmi", "model")
"""What LMI calls any base model; the engine does not know it by these names."""

_OPTIONS = ServerSettings()


@dataclass(frozen=True, slots=True)
class HttpSettings(HttpLimits):
    """The limits of one server. What is not explained here is an option of config/server_settings.py.

    model_names:        names of the base model in paths and bodies; besides them a name is an adapter's.
    is_embedding:       the model makes embeddings: `inputs` asks for them.
    job_queue_size:     requests in the engine at a time; more are refused. Half of them is divided between the
                        principals.
    predict_timeout_s:  from admission to the last byte of the answer.
    """

    model_names: tuple[str, ...] = LMI_NAMES
    is_embedding: bool = False
    compat: Compat = _OPTIONS.compat
    no_sessions: bool = _OPTIONS.no_sessions
    sessions_path: Path = _OPTIONS.sessions_path
    session_expiry_s: float = _OPTIONS.session_expiry_s
    strict_sessions: bool = _OPTIONS.strict_sessions
    forget_closed_sessions: bool = _OPTIONS.forget_closed_sessions
    job_queue_size: int = _OPTIONS.job_queue_size
    predict_timeout_s: float = _OPTIONS.predict_timeout_s
