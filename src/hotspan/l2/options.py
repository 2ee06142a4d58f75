"""What the client of each kind of L2 can be told, written once: reading, checking and the docs come from it."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StoreOption:
    """One NAME of --l2-option. default: None is none, or what the store chooses."""

    name: str
    kind: type
    default: Any
    meaning: str


def _option(name: str, kind: type, default: Any, meaning: str) -> StoreOption:
    return StoreOption(name, kind, default, meaning)


REDIS = (
    _option("password", str, None, "Password of the server: `file:PATH` (mode 0600) or `env:NAME`."),
    _option("prefix", str, "hotspan", "Beginning of all keys; L2s with different ones share nothing."),
    _option("timeout_s", float, 1.0, "Seconds that one call may wait; each 8 MiB that it moves are a second more."),
    _option("ttl_s", float, None, "Seconds after which an object expires, used or not."),
)
FILE = (
    _option(
        "capacity_gib", float, None, "GiB of objects to keep, about. Without it the directory grows until it is full."
    ),
    _option("timeout_s", float, 5.0, "Seconds that one call may wait for 4 MiB, or for one file."),
)
S3 = (
    _option("timeout_s", float, 5.0, "Seconds that one call may take."),
    _option("segment_chunks", int, 4, "No effect since each chunk is an object of its own."),
    _option("pending_bytes", int, 1 << 30, "No effect since each chunk is an object of its own."),
    _option("connections", int, 64, "Requests at a time."),
    _option("log_entries", int, 1 << 16, "Invalidations that the log keeps; chunks older than all of them are misses."),
    _option("is_per_tenant", bool, True, "Keep the objects of each tenant under a name of its own."),
)
S3_WITHOUT_EFFECT = frozenset({"segment_chunks", "pending_bytes"})

HYPERPOD = (
    _option("bucket", str, "lmcache", "Bucket of the objects."),
    _option("shared_memory_name", str, "ai_toolkit_cache", "Name of the daemon's shared memory, in /dev/shm."),
    _option("timeout_ms", int, 5000, "Milliseconds that one call may take, at least 100."),
    _option(
        "lease_wait_timeout_ms", int, 1000, "Milliseconds that a lease may wait for an object that is being written."
    ),
    _option("lease_ttl_s", float, 30.0, "Seconds after which the daemon may use the bytes of a lease for others."),
    _option("max_lease_size_mb", int, None, "MiB of one object; larger ones are misses."),
    _option("max_concurrent_requests", int, 100, "Requests at a time. The least of this and the next two counts."),
    _option("max_connections", int, 256, "Connections."),
    _option("max_connections_per_host", int, 128, "Connections to one daemon."),
    _option("put_stream_chunk_bytes", int, 65536, "Bytes that are handed to the network at once, at least 1024."),
    _option("use_https", bool, False, "Speak TLS to the daemon."),
)
"""With or without `sagemaker_hyperpod_` before them."""

LOG = (_option("log_password", str, None, "Password of the Redis that --l2-log names, as a reference."),)

OVER_THE_DOOR = frozenset({"timeout_ms", "shared_memory_name"})
"""Those of HYPERPOD that have an effect where hotspan's own daemon is reached by its local socket."""

STORE_OPTIONS = {
    "`redis://`, `rediss://`": REDIS,
    "`file:///`": FILE,
    "`s3://`": S3,
    "`sagemaker-hyperpod://`": HYPERPOD,
    "any, with `--l2-log`": LOG,
}
