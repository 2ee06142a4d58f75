"""What a replica's server does besides caching, parsed once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hotspan.core.types import MIB

Compat = Literal["none", "lmi"]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Sessions that clients open and close by name.

    path:          the directory that keeps them.
    expiry_s:      after which an unused one is gone.
    is_strict:     an id that nobody opened is an error.
    close_forgets: closing one also invalidates what the cache holds of it.
    """

    path: Path
    expiry_s: float
    is_strict: bool = False
    close_forgets: bool = False


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How a store of several models is served.

    default:    the model that requests mean that name none; None has them name one.
    is_partial: a model that can't be loaded leaves the others running.
    at_once:    models that load at a time; None decides by the machine.
    """

    default: str | None = None
    is_partial: bool = False
    at_once: int | None = None


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """One replica's server.

    job_queue_size:    requests in the engine at a time; more are refused until one ends.
    max_request_bytes: of a request's body.
    predict_timeout_s: of one request, from its arrival to its last byte.
    startup_timeout_s: until the model is loaded.
    sessions:          None without.
    compat:            "lmi" answers errors with LMI's status 424.
    adapters:          directory with one adapter in each of its directories.
    adapter_copies:    where the server keeps its copies of them; None for a directory of its own in /tmp.
    client_adapters:   clients may register adapters, from this directory too; None leaves that to the administrator.
    max_client_adapters: registered at a time by one tenant; without keys, by all clients. None is the default of each.
    formatters:        directory with model.py or formatter.yaml.
    is_secure:         no code of the model's is executed, and only safetensors are read.
    admin_token_file:  None takes the token from the environment, or makes one.
    is_insecure:       other machines may reach it without a key.
    admin_port:        where administration is, at `admin_host`; None has it where the clients are.
    store:             what counts if there are several models.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    job_queue_size: int = 1000
    max_request_bytes: int = 64 * MIB
    predict_timeout_s: float = 240.0
    startup_timeout_s: float = 1200.0
    sessions: SessionSettings | None = None
    compat: Compat = "none"
    adapters: Path | None = None
    adapter_copies: Path | None = None
    client_adapters: Path | None = None
    max_client_adapters: int | None = None
    formatters: Path | None = None
    formatter_timeout_s: float = 5.0
    is_secure: bool = False
    admin_token_file: Path | None = None
    is_insecure: bool = False
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    store: StoreSettings = field(default_factory=StoreSettings)
