"""What a client of HyperPod's managed tiered storage can be told, under the names that its users write already."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.types import MIB

PREFIX = "sagemaker_hyperpod_"
"""Of every key."""

_LEAST = {
    "max_concurrent_requests": 1,
    "max_connections": 1,
    "max_connections_per_host": 1,
    "timeout_ms": 100,
    "lease_wait_timeout_ms": 0,
    "put_stream_chunk_bytes": 1024,
    "max_lease_size_mb": 1,
}
_MOST = 2**31 - 1
_MOST_NAME = 255  # of a file in /dev/shm
_HOLD_ALLOWANCE_S = 0.5


@dataclass(frozen=True, slots=True)
class HyperpodSettings:
    """How to speak to one node's daemon.

    shared_memory_name:     of the daemon's segment, in /dev/shm.
    max_concurrent_requests, max_connections, max_connections_per_host: the least of them is what is opened.
    timeout_ms:             how long any call of the store may take.
    lease_wait_timeout_ms:  how long the daemon may hold a lease for an object that is being written.
    lease_ttl_s:            after which the daemon may reuse the bytes that a lease pins.
    put_stream_chunk_bytes: handed to the kernel at once.
    max_lease_size_mb:      of one object, in MiB; None for whatever the segment holds.
    """

    bucket: str = "lmcache"
    shared_memory_name: str = "shared_memory"
    max_concurrent_requests: int = 100
    max_connections: int = 256
    max_connections_per_host: int = 128
    timeout_ms: int = 5000
    lease_wait_timeout_ms: int = 1000
    lease_ttl_s: float = 30.0
    put_stream_chunk_bytes: int = 65536
    use_https: bool = False
    max_lease_size_mb: int | None = None

    def __post_init__(self) -> None:
        """Raises: ConfigError for what can't work."""
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= _MOST:
                raise ConfigError(f"{PREFIX}{name} is {value}: give a whole number from {least} to {_MOST}")
        if not (math.isfinite(self.lease_ttl_s) and self.lease_ttl_s > 0):
            raise ConfigError(f"{PREFIX}lease_ttl_s is {self.lease_ttl_s}: give seconds, above 0")
        if not self.bucket or not self.bucket.isprintable():
            raise ConfigError(f"{PREFIX}bucket is {self.bucket!r}: give a name (lmcache is the default)")
        if not _is_segment_name(self.shared_memory_name):
            raise ConfigError(
                f"{PREFIX}shared_memory_name is {self.shared_memory_name!r}: give the name of a file in /dev/shm, as "
                "HyperPod injects it (ai_toolkit_cache)"
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
    def most_bytes(self) -> int | None:
        """Of one object."""
        return None if self.max_lease_size_mb is None else self.max_lease_size_mb * MIB


def parse_hyperpod_settings(given: Mapping[str, Any]) -> HyperpodSettings:
    """Settings from keys with the prefix, their values as JSON or YAML has them, or as text.

    Raises: ConfigError that names the key and says what would do.
    """
    known = {PREFIX + field.name: field for field in fields(HyperpodSettings)}
    values: dict[str, Any] = {}
    for key, value in given.items():
        field = known.get(key)
        if field is None:
            plain = PREFIX + str(key).removeprefix(PREFIX)
            hint = did_you_mean(plain, known, f"it may be {', '.join(known)}", cutoff=0.85)  # of names with a prefix
            raise ConfigError(f"there is no setting {key!r}: {hint}")
        kind = int if field.default is None else type(field.default)
        values[field.name] = None if value is None and field.default is None else _parsed(key, kind, value)
    return HyperpodSettings(**values)


def _parsed(key: str, kind: type, value: Any) -> Any:
    if kind is bool:
        said = value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
        if said is None:
            raise ConfigError(f"{key} is {value!r}: give true or false")
        return said
    if isinstance(value, str) and kind is not str:
        try:
            value = kind(value)
        except ValueError as error:
            raise ConfigError(f"{key} is {value!r}: give a number") from error
    if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MOST:
        value = float(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(f"{key} is {value!r}: give {'text' if kind is str else 'a number'}")
    return value


def _is_segment_name(name: str) -> bool:
    """Whether it is one file in /dev/shm; POSIX's leading slash is allowed."""
    plain = name.removeprefix("/")
    return 0 < len(plain.encode()) <= _MOST_NAME and plain not in (".", "..") and not {"/", "\0"} & set(plain)
