"""The options of `hotspan daemon`."""

from dataclasses import MISSING, dataclass
from pathlib import Path

from hotspan.config.kinds import GIB, OCTAL, TEXTS
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

_MAX_GIB = 1 << 30
_MIN_LEASE_S = 2.0
"""What replicas of hotspan ask for (l2/daemon.py, LEASE_S)."""
_MAX_LEASE_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """What `hotspan daemon` is started with."""

    size_gib: float = option(MISSING, "Size of the cache, in GiB of /dev/shm.", kind=GIB)
    host: str = option("127.0.0.1", "Address to listen on. The protocol has no authentication.")
    port: int = option(9200, "Port to listen on; 0 takes a free one.")
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host name that HTTP requests may use, besides this machine's. May be repeated. *: any.",
        name="allowed_host",
        kind=TEXTS,
    )
    shared_memory_name: str = option("ai_toolkit_cache", "Name of the shared memory; clients need the same one.")
    mode: int = option(0o600, "Permissions of the shared memory and the local socket, in octal.", kind=OCTAL)
    max_lease_s: float = option(600.0, "Maximum duration of a lease, in seconds; longer ones are refused.")
    disk: Path | None = option(None, "Directory for copies of the objects, which survive a restart.")
    disk_gib: float = option(0.0, "Size of --disk, in GiB.", kind=GIB)
    metrics_port: int | None = option(None, "Additional port that serves /metrics and /health only, for monitoring.")

    def __post_init__(self) -> None:
        """Raises: ConfigError for what can't work."""
        if not 0 < self.size_gib < _MAX_GIB:
            raise ConfigError(f"--size-gib {self.size_gib:g} is no size: give how much of /dev/shm the cache may take")
        if self.mode & ~0o777 or self.mode & 0o600 != 0o600:
            raise ConfigError(f"--mode {self.mode:o} shuts out the daemon's own user: give one like 600 or 660")
        if not _MIN_LEASE_S <= self.max_lease_s <= _MAX_LEASE_S:
            raise ConfigError(
                f"--max-lease-s is {self.max_lease_s:g}: give seconds, at least the {_MIN_LEASE_S:g} that hotspan's "
                "own replicas ask for and at most a day"
            )
        if (self.disk is None) != (self.disk_gib == 0):
            raise ConfigError(
                "--disk and --disk-gib belong together: give a directory, and how much of it may be taken"
            )
        if self.disk is not None and not 0 < self.disk_gib < _MAX_GIB:
            raise ConfigError(f"--disk-gib {self.disk_gib:g} is no size: give how much of {self.disk} may be taken")
