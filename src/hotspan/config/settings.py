"""The cache's settings, as they travel from the command line to the engine's processes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from hotspan.core.directives import RetentionRule
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB

ModelDigest = Literal["sampled", "full"]
Persistence = Literal["tiers", "none"]

_MOST_GIB = 1 << 30
LOG_PASSWORD = "log_password"
"""Among the options of an L2: the password of its `log`."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """A disk tier: a directory of its own, and how many bytes of it to take."""

    directory: str
    bytes: int
    threads: int = 4


@dataclass(frozen=True, slots=True)
class L2Settings:
    """A store that replicas share.

    url:     redis://, rediss://, file:///, s3:// or sagemaker-hyperpod://.
    options: of its client, by the names of its kind (l2/options.py), and LOG_PASSWORD.
    log:     url of a store that keeps the log of invalidations, where that of `url` can't.
    """

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    log: str | None = None
    threads: int = 4

    @property
    def store_options(self) -> dict[str, str]:
        """What the client of `url` is told."""
        return {name: value for name, value in self.options.items() if name != LOG_PASSWORD}

    @property
    def log_options(self) -> dict[str, str]:
        """What the client of `log` is told."""
        return {"password": self.options[LOG_PASSWORD]} if LOG_PASSWORD in self.options else {}


@dataclass(frozen=True, slots=True)
class EncryptionSettings:
    """Encryption of all that leaves RAM.

    kek:   the key-encryption key, by reference: file:PATH, env:NAME or aws-kms:KEY.
    store: the directory with the tenants' wrapped keys.
    """

    kek: str
    store: str


@dataclass(frozen=True, slots=True)
class TenantShare:
    """A tenant that is known by name, and its part of each tier as a fraction (tiers/eviction.py)."""

    tenant: str
    floor: float | None = None
    quota: float = 1.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """What the tiers of one engine are.

    ram_bytes:    the RAM tier, of /dev/shm; 0 is to be chosen before an engine gets it (planned.py).
    chunk_tokens: tokens of a chunk, raised to a whole number of the engine's blocks.
    prompts_only: answers are not stored.
    model_digest: "full" reads all of the weights once, "sampled" their headers and samples at each start.
    persistence:  "none" keeps everything in memory: no disk, no remote tier.
    encryption:   None writes plain frames.
    is_isolated:  tenants never hit each other's chunks.
    is_strict:    only requests that the server has named a tenant for are cached.
    tenants:      those known at the start; others may come.
    retention:    rules over every request's own time to live.
    drain_s:      how long a stopping engine goes on writing to disk.
    patience_s:   None lets the cost model decide what is loaded from below RAM, and how long a request waits for it; a
                  number loads all that is there, and lets a request wait so long while nothing lands.
    error_file:   where an engine process writes why it refused to start, for the launcher to show.
    events_key:   a file with the key of KV events; None publishes them to whoever connects.
    """

    ram_bytes: int
    disk: DiskSettings | None = None
    l2: L2Settings | None = None
    chunk_tokens: int = 256
    prompts_only: bool = False
    model_digest: ModelDigest = "full"
    persistence: Persistence = "tiers"
    encryption: EncryptionSettings | None = None
    is_isolated: bool = True
    is_strict: bool = False
    tenants: tuple[TenantShare, ...] = ()
    retention: tuple[RetentionRule, ...] = ()
    drain_s: float = 10.0
    patience_s: float | None = None
    error_file: str | None = None
    events_key: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """A dict that `from_json` takes, of JSON types only."""
        return {**asdict(self), "events_key": None if self.events_key is None else str(self.events_key)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CacheSettings":
        """The settings that `to_json` gave."""
        fields = dict(data)
        if fields.get("disk") is not None:
            fields["disk"] = DiskSettings(**fields["disk"])
        if fields.get("events_key") is not None:
            fields["events_key"] = Path(fields["events_key"])
        if fields.get("l2") is not None:
            fields["l2"] = L2Settings(**fields["l2"])
        if fields.get("encryption") is not None:
            fields["encryption"] = EncryptionSettings(**fields["encryption"])
        fields["tenants"] = tuple(TenantShare(**share) for share in fields.get("tenants", ()))
        fields["retention"] = tuple(RetentionRule(**rule) for rule in fields.get("retention", ()))
        return cls(**fields)


def cache_settings(
    *,
    ram_gib: float | None,
    disk: Path | None = None,
    disk_gib: float | None = None,
    l2: str | None = None,
    l2_options: Mapping[str, str] | None = None,
    l2_log: str | None = None,
    chunk_tokens: int = 256,
    prompts_only: bool = False,
    model_digest: str = "full",
    persistence: str = "tiers",
    kek: str | None = None,
    key_store: Path | None = None,
    is_isolated: bool = True,
    is_strict: bool = False,
    tenants: tuple[TenantShare, ...] = (),
    retention: tuple[RetentionRule, ...] = (),
    error_file: Path | None = None,
    events_key: Path | None = None,
) -> CacheSettings:
    """Settings from what the command line and the file of tenants gave.

    ram_gib: None is to be chosen.
    Raises: ConfigError that says which option is wrong and what would do.
    """
    if ram_gib is not None and not 0 < ram_gib <= _MOST_GIB:
        raise ConfigError(
            f"--ram-gib is {ram_gib:g}: hotspan needs RAM to pass chunks through, give at least what the requests in "
            "flight need (tokens x KV bytes per token), or --no-cache to serve without hotspan's tiers"
        )
    if (disk is None) != (disk_gib is None):
        missing, given = ("--disk-gib", "--disk") if disk_gib is None else ("--disk", "--disk-gib")
        raise ConfigError(f"{given} is given without {missing}: a disk tier needs a directory and a size")
    if disk_gib is not None and not 0 < disk_gib <= _MOST_GIB:
        raise ConfigError(f"--disk-gib is {disk_gib:g}: give the size of the disk tier in GiB, above 0")
    if chunk_tokens < 1:
        raise ConfigError(f"--chunk-tokens is {chunk_tokens}: give a positive number of tokens (256 is the default)")
    if model_digest not in ("sampled", "full"):
        raise ConfigError(f"--model-digest is {model_digest!r}: give full (the default) or sampled")
    if persistence not in ("tiers", "none"):
        raise ConfigError(f"--persistence is {persistence!r}: give tiers (the default) or none")
    if persistence == "none" and disk is not None:
        raise ConfigError(
            "--persistence none keeps KV in memory only, and --disk writes it down: leave one of them out"
        )
    if persistence == "none" and l2 is not None:
        raise ConfigError("--persistence none keeps KV in memory only, and --l2 sends it away: leave one of them out")
    if l2 is None and (l2_options or l2_log is not None):
        raise ConfigError("--l2-option and --l2-log belong to an L2: name it with --l2")
    if l2_log is None and LOG_PASSWORD in (l2_options or {}):
        raise ConfigError(f"--l2-option {LOG_PASSWORD} belongs to a log of its own: name that with --l2-log")
    if (kek is None) != (key_store is None):
        missing, given = ("--key-store", "--kek") if key_store is None else ("--kek", "--key-store")
        raise ConfigError(f"{given} is given without {missing}: `hotspan keys init` makes a key store for a KEK")
    disk_settings = None
    if disk is not None and disk_gib is not None:
        disk_settings = DiskSettings(str(disk.expanduser().absolute()), int(disk_gib * GIB))
    return CacheSettings(
        ram_bytes=0 if ram_gib is None else int(ram_gib * GIB),
        disk=disk_settings,
        l2=None if l2 is None else L2Settings(l2, dict(l2_options or {}), l2_log),
        chunk_tokens=chunk_tokens,
        prompts_only=prompts_only,
        model_digest=cast(ModelDigest, model_digest),
        persistence=cast(Persistence, persistence),
        encryption=_encryption(kek, key_store),
        is_isolated=is_isolated,
        is_strict=is_strict,
        tenants=tenants,
        retention=retention,
        error_file=str(error_file) if error_file is not None else None,
        events_key=None if events_key is None else events_key.expanduser().absolute(),
    )


def _encryption(kek: str | None, key_store: Path | None) -> EncryptionSettings | None:
    if kek is None or key_store is None:
        return None
    if kek.startswith("file:"):  # the engine's processes may run in another directory
        kek = f"file:{Path(kek.removeprefix('file:')).expanduser().absolute()}"
    return EncryptionSettings(kek, str(key_store.expanduser().absolute()))
