"""The options of `hotspan serve` for its server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hotspan.config import kinds
from hotspan.config.options import Spelling, names, option
from hotspan.core.types import MIB

Compat = Literal["none", "lmi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What one replica's server does besides caching."""

    admin_token_file: Path | None = option(
        None, "File (mode 0600) with the admin token. Default: HOTSPAN_ADMIN_TOKEN, or a token generated for this run."
    )
    admin_port: int | None = option(
        None, "Separate port for administration. With it, --port refuses administration.", kind=kinds.COUNT
    )
    admin_host: str = option("127.0.0.1", "Address of --admin-port.")
    admin_address: str | None = option(
        None,
        "HOST:PORT for administration: --admin-host and --admin-port in one. An engine that your own vLLM runs listens "
        "there beside its Unix socket.",
        kind=kinds.ADDRESS,
    )
    insecure: bool = option(False, "Allow a --host other than 127.0.0.1 without API keys.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name that requests may use where no API key is needed, besides this machine's. May be repeated. *: any.",
        name="allowed_host",
        kind=kinds.TEXTS,
    )
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8080, "Port to listen on.", variables=names("SAGEMAKER_BIND_TO_PORT"))
    job_queue_size: int = option(
        1000,
        "Maximum number of requests in the engine; further requests are refused with 429 or 503.",
        kind=kinds.COUNT,
        lmi=names("job_queue_size"),
        variables=names("MAX_CONCURRENT_REQUESTS"),
    )
    max_request_bytes: int = option(
        64 * MIB,
        "Maximum size of a request body, in bytes.",
        kind=kinds.COUNT,
        lmi=names("max_request_size"),
        variables=names(
            "SAGEMAKER_MAX_REQUEST_SIZE", Spelling("SAGEMAKER_MAX_PAYLOAD_IN_MB", kinds.MEBIBYTES, order=1)
        ),
    )
    max_text_bytes: int | None = option(
        None,
        "Maximum size of a request body whose prompt is text, in bytes. Default: 1 MiB, and 6 bytes for each character "
        "of the longest text that fits the model. Models that take other media, embeddings as prompts, or batches "
        "(pooling) have --max-request-bytes alone.",
        kind=kinds.COUNT,
    )
    predict_timeout_s: float = option(
        240.0,
        "Maximum duration of one request, in seconds.",
        kind=kinds.SECONDS,
        lmi=names("option.predict_timeout"),
        variables=names(
            "SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS",
            Spelling("SAGEMAKER_MODEL_SERVER_TIMEOUT", order=1),
            "PREDICT_TIMEOUT",
        ),
    )
    startup_timeout_s: float = option(
        1200.0,
        "Maximum time to load the model, in seconds.",
        kind=kinds.SECONDS,
        lmi=names("option.model_loading_timeout"),
        variables=names("SAGEMAKER_STARTUP_TIMEOUT", "MODEL_LOADING_TIMEOUT"),
    )
    step_timeout_s: float = option(
        60.0,
        "Maximum time without an engine step while requests are in work, in seconds; then health checks are 503. On a "
        "CPU engine, ten times this while its processes compute.",
        kind=kinds.SECONDS,
    )
    no_sessions: bool = option(
        False, "Refuse sessions (NEW_SESSION).", lmi=names(Spelling("option.enable_stateful_sessions", kinds.INVERTED))
    )
    sessions_path: Path = option(
        Path("/dev/shm/hotspan_sessions"), "Directory for sessions.", lmi=names("option.sessions_path")
    )
    session_expiry_s: float = option(
        1200.0,
        "Seconds after which an unused session expires.",
        kind=kinds.SECONDS,
        lmi=names("option.sessions_expiration"),
    )
    strict_sessions: bool = option(False, "Refuse ids of sessions that were not opened. Default: any id is accepted.")
    forget_closed_sessions: bool = option(False, "Invalidate the cached texts of a session when it is closed.")
    drop_system_line: tuple[str, ...] = option(
        (),
        "Drop the lines of system prompts that begin with a match of this regular expression, such as an id that "
        "changes in each request and spoils the cached prefix. The model does not read them. May be repeated.",
        kind=kinds.PATTERNS,
    )
    move_system_line: tuple[str, ...] = option(
        (),
        "Move such lines, such as the date, to the end of their system prompt, so that what stands before stays a "
        "cached prefix. May be repeated.",
        kind=kinds.PATTERNS,
    )
    compat: Compat = option("none", "lmi: errors have LMI's status 424.")
    adapters: Path | None = option(
        None, "Directory with one LoRA adapter per subdirectory. Default: adapters/ in the model's directory."
    )
    adapter_copies: Path | None = option(
        None, "Directory for the server's copies of adapters. Default: /tmp/hotspan-adapters-UID."
    )
    client_adapters: Path | None = option(
        None, "Let clients register adapters without the admin token, from this directory too (SageMaker)."
    )
    max_client_adapters: int | None = option(
        None,
        "Maximum number of adapters that a tenant may register. Default: 32, or 1000 where clients have no API keys.",
        kind=kinds.COUNT,
    )
    formatters: Path | None = option(
        None, "Directory with model.py or formatter.yaml. Default: the model's directory, in LMI's configuration only."
    )
    default_model: str | None = option(
        None, "Directory of models: default model for requests without `model`.", lmi=names("default_model")
    )
    partial: bool = option(False, "Directory of models: serve the models that load, and retry the others.")
    models_at_once: int | None = option(
        None,
        "Directory of models: models to load at a time. Default: one, or all if each has GPUs of its own.",
        kind=kinds.COUNT,
    )
    formatter_timeout_s: float = option(5.0, "Maximum duration of one formatter call, in seconds.", kind=kinds.SECONDS)
    secure: bool = option(
        False,
        "Secure mode: execute no code of the model, and read safetensors only.",
        variables=names("SAGEMAKER_SECURE_MODE"),
    )
