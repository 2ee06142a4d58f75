"""The cache's settings, as they travel from the command line to the engine's processes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB

ModelDigest = Literal["sampled", "full"]


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """A disk tier: a directory of its own, and how many bytes of it to take."""

    directory: str
    bytes: int
    threads: int = 4


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the tiers of one engine are.

    ram_bytes:    the RAM tier, of /dev/shm.
    chunk_tokens: tokens of a chunk, raised to a whole number of the engine's blocks.
    model_digest: "sampled" reads headers and samples of the weights, "full" all of them.
    drain_s:      how long a stopping engine goes on writing to disk.
    patience_s:   how long a request waits for a lower tier while nothing lands (docs/architecture.md, Load).
    error_file:   where an engine process writes why it refused to start, for the launcher to show.
    """

    ram_bytes: int
    disk: DiskSettings | None = None
    chunk_tokens: int = 256
    model_digest: ModelDigest = "sampled"
    drain_s: float = 10.0
    patience_s: float = 0.050
    error_file: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict that `from_json` takes, of JSON types only."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CacheSettings":
        """The settings that `to_json` gave."""
        fields = dict(data)
        if fields.get("disk") is not None:
            fields["disk"] = DiskSettings(**fields["disk"])
        return cls(**fields)


def cache_settings(
    *,
    ram_gib: float,
    disk: Path | None = None,
    disk_gib: float | None = None,
    chunk_tokens: int = 256,
    model_digest: str = "sampled",
    error_file: Path | None = None,
) -> CacheSettings:
    """Settings from what the command line gave.

    Raises: ConfigError that says which option is wrong and what would do.
    """
    if not ram_gib > 0:
        raise ConfigError(
            f"--ram-gib is {ram_gib:g}: hotspan needs RAM to pass chunks through, give at least what the requests in "
            "flight need (tokens x KV bytes per token), or --no-cache to serve without hotspan's tiers"
        )
    if (disk is None) != (disk_gib is None):
        missing, given = ("--disk-gib", "--disk") if disk_gib is None else ("--disk", "--disk-gib")
        raise ConfigError(f"{given} is given without {missing}: a disk tier needs a directory and a size")
    if disk_gib is not None and not disk_gib > 0:
        raise ConfigError(f"--disk-gib is {disk_gib:g}: give the size of the disk tier in GiB, above 0")
    if chunk_tokens < 1:
        raise ConfigError(f"--chunk-tokens is {chunk_tokens}: give a positive number of tokens (256 is the default)")
    if model_digest not in ("sampled", "full"):
        raise ConfigError(f"--model-digest is {model_digest!r}: give sampled or full")
    disk_settings = None
    if disk is not None and disk_gib is not None:
        disk_settings = DiskSettings(str(disk.expanduser().absolute()), int(disk_gib * GIB))
    return CacheSettings(
        ram_bytes=int(ram_gib * GIB),
        disk=disk_settings,
        chunk_tokens=chunk_tokens,
        model_digest=cast(ModelDigest, model_digest),
        error_file=str(error_file) if error_file is not None else None,
    )
