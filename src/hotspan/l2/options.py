"""What the client of each kind of L2 can be told: each option once, as a field of what the store is opened with.

Parsing, checks, `--l2-option` and the table in docs/configuration.md follow from these declarations.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from types import UnionType
from typing import Any, TypeVar, get_args

from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.redaction import redacted
from hotspan.core.types import MIB

T = TypeVar("T")

HYPERPOD_PREFIX = "sagemaker_hyperpod_"
"""What HyperPod's users write before each name."""

SEGMENT_NAME = "ai_toolkit_cache"
"""The name of the daemon's shared memory where nothing else is said: HyperPod's."""

OWN_BUCKET = "hotspan"
"""Where hotspan's daemon keeps what comes by its Unix socket: an object's name is its chunk's key, in hexadecimal."""

_MAX = 2**31 - 1
_MAX_NAME = 255  # of a file in /dev/shm
_HOLD_ALLOWANCE_S = 0.5


def _option(default: Any, help: str, *, least: float | None = None) -> Any:
    """A field that users can set, to `least` or more; 0 as the least of a float excludes it."""
    return field(default=default, metadata={"help": help, "least": least})


class _Checked:
    """Values within their bounds."""

    __slots__ = ()

    def __post_init__(self) -> None:
        """Raises: ConfigError for what can't work."""
        for each in fields(self):  # type: ignore[arg-type]
            value, least = getattr(self, each.name), each.metadata.get("least")
            if least is None or value is None:
                continue
            is_whole = isinstance(least, int)
            if not (least <= value <= _MAX if is_whole else least < value <= _MAX):
                kind = f"a whole number from {least} to {_MAX}" if is_whole else f"a number above {least:g}"
                raise ConfigError(f"{each.name} is {value}: give {kind}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RedisOptions(_Checked):
    """How to use Redis. log_entries: that the log keeps."""

    password: str | None = field(
        default=None, repr=False, metadata={"help": "Password of the server: `file:PATH` (mode 0600) or `env:NAME`."}
    )
    prefix: str = _option("hotspan", "Beginning of all keys; L2s with different ones share nothing.")
    timeout_s: float = _option(
        1.0, "Seconds that one call may wait; each 8 MiB that it moves are a second more.", least=0.0
    )
    ttl_s: float | None = _option(None, "Seconds after which an object expires, used or not.", least=0.0)
    log_entries: int = 1 << 16

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if not self.prefix or set(self.prefix) & set("{}"):
            raise ConfigError(f"{self.prefix!r} can't begin the names of keys: give a word without braces")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileOptions(_Checked):
    """How to use a directory. log_entries: that the log keeps.

    About `capacity_gib` are kept: each writer counts what it wrote itself, and looks at the others' from time to time.
    """

    capacity_gib: float | None = _option(
        None, "GiB of objects to keep, about. Without it the directory grows until it is full.", least=0.0
    )
    timeout_s: float = _option(5.0, "Seconds that one call may wait for 4 MiB, or for one file.", least=0.0)
    log_entries: int = 1 << 14


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Options(_Checked):
    """How to use a bucket.

    client: obstore's settings for S3 by their names: endpoint, region, access_key_id, secret_access_key, session_token,
            virtual_hosted_style_request, skip_signature, unsigned_payload, sse_kms_key_id, ... What is not named,
            obstore takes from AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
            AWS_SESSION_TOKEN, ..., and credentials from web identity (AWS_WEB_IDENTITY_TOKEN_FILE), container or
            instance; it reads no profiles.
    """

    timeout_s: float = _option(5.0, "Seconds that one call may take.", least=0.0)
    connections: int = _option(64, "Requests at a time.", least=1)
    log_entries: int = _option(
        1 << 16, "Invalidations that the log keeps; chunks older than all of them are misses.", least=1
    )
    is_per_tenant: bool = _option(True, "Keep the objects of each tenant under a name of its own.")
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperpodOptions(_Checked):
    """How to speak to one node's daemon."""

    bucket: str = _option("lmcache", "Bucket of the objects.")
    shared_memory_name: str = _option(SEGMENT_NAME, "Name of the daemon's shared memory, in /dev/shm.")
    timeout_ms: int = _option(5000, "Milliseconds that one call may take, at least 100.", least=100)
    lease_wait_timeout_ms: int = _option(
        1000, "Milliseconds that a lease may wait for an object that is being written.", least=0
    )
    lease_ttl_s: float = _option(
        30.0, "Seconds after which the daemon may use the bytes of a lease for others.", least=0.0
    )
    max_lease_size_mb: int | None = _option(None, "MiB of one object; larger ones are misses.", least=1)
    max_concurrent_requests: int = _option(
        100, "Requests at a time. The least of this and the next two counts.", least=1
    )
    max_connections: int = _option(256, "Connections.", least=1)
    max_connections_per_host: int = _option(128, "Connections to one daemon.", least=1)
    put_stream_chunk_bytes: int = _option(
        65536, "Bytes that are handed to the network at once, at least 1024.", least=1024
    )
    use_https: bool = _option(False, "Speak TLS to the daemon.")

    def __post_init__(self) -> None:
        _Checked.__post_init__(self)
        if not self.bucket or not self.bucket.isprintable():
            raise ConfigError(f"bucket is {self.bucket!r}: give a name (lmcache is the default)")
        if self.bucket == OWN_BUCKET:
            raise ConfigError(
                f"bucket is {self.bucket}, where hotspan's daemon keeps what comes by its Unix socket, whose tags HTTP "
                "does not show: give another name (lmcache is the default)"
            )
        name = self.shared_memory_name.removeprefix("/")  # POSIX's
        if not 0 < len(name.encode()) <= _MAX_NAME or name in (".", "..") or {"/", "\0"} & set(name):
            raise ConfigError(
                f"shared_memory_name is {self.shared_memory_name!r}: give the name of a file in /dev/shm, as HyperPod "
                f"injects it ({SEGMENT_NAME})"
            )

    @property
    def connections(self) -> int:
        """How many connections there may be: one host has one request at a time on each."""
        return min(self.max_concurrent_requests, self.max_connections, self.max_connections_per_host)

    @property
    def timeout_s(self) -> float:
        """How long any call may take, in seconds."""
        return self.timeout_ms / 1000

    @property
    def lease_timeout_s(self) -> float:
        """How long the answer to a lease may take, in seconds."""
        return min(self.timeout_s, self.lease_wait_timeout_ms / 1000 + _HOLD_ALLOWANCE_S)

    @property
    def max_bytes(self) -> int | None:
        """Of one object."""
        return None if self.max_lease_size_mb is None else self.max_lease_size_mb * MIB


ON_UNIX_SOCKET = frozenset({"timeout_ms", "shared_memory_name"})
"""Those of HyperpodOptions that have an effect where hotspan's own daemon is reached by its Unix socket."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """How to use the store that `--l2-log` names."""

    log_password: str | None = _option(None, "Password of the Redis that --l2-log names, as a reference.")


STORE_OPTIONS: dict[str, type] = {
    "`redis://`, `rediss://`": RedisOptions,
    "`file:///`": FileOptions,
    "`s3://`": S3Options,
    "`sagemaker-hyperpod://`": HyperpodOptions,
    "any, with `--l2-log`": LogOptions,
}


def options_of(kind: type) -> Iterator[Field[Any]]:
    """The fields of a store's options that users can set; `metadata["help"]` says what each does."""
    return (each for each in fields(kind) if "help" in each.metadata)


def parse_options(kind: type[T], given: Mapping[str, Any], prefix: str = "", **more: Any) -> T:
    """A store's options from values as JSON or YAML has them, or as text.

    prefix: which names may have before them. more: other fields.
    Raises: ConfigError that names the option and says what would do.
    """
    known = {each.name: each for each in options_of(kind)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        plain = name.removeprefix(prefix)
        if plain not in known:
            names = sorted(name.removesuffix(plain) + each for each in known)
            hint = did_you_mean(name, names, f"it has {', '.join(names)}", cutoff=0.6 if plain == name else 0.85)
            raise ConfigError(f"--l2-option {name}: this L2 has no such option; {hint}")
        values[plain] = _parsed(name, known[plain].type, value)
    return kind(**values, **more)


def _parsed(name: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, UnionType):
        if value is None:
            return None
        kind = get_args(kind)[0]
    shown = redacted(value, name) if isinstance(value, str) else value
    if kind is bool:
        said = value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
        if said is None:
            raise ConfigError(f"--l2-option {name} is {shown!r}: give true or false")
        return said
    wanted = "text" if kind is str else "a number"
    try:
        parsed = kind(value) if isinstance(value, str) or (kind is float and type(value) is int) else value
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"--l2-option {name} is {shown!r}: give {wanted}") from error
    if type(parsed) is not kind or (kind is float and not math.isfinite(parsed)):
        wanted = "a finite number" if kind is float else wanted
        raise ConfigError(f"--l2-option {name} is {shown!r}: give {wanted}")
    return parsed
