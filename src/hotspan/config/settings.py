"""The cache's settings, as they travel from the command line to the engine's processes."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hotspan.config import kinds
from hotspan.config.options import Spelling, check, names, option
from hotspan.core.directives import RetentionRule
from hotspan.core.errors import ConfigError
from hotspan.core.types import CHUNK_TOKENS, GIB, Compress

if TYPE_CHECKING:
    from pydantic import TypeAdapter

ModelDigest = Literal["full", "sampled"]
Persistence = Literal["tiers", "none"]
Blend = Literal["off", "allowed", "first_k", "deviation", "query"]

_MAX_GIB = 1 << 30
LOG_PASSWORD = "log_password"
"""Among the options of an L2: the password of its `log`."""


@dataclass(frozen=True, slots=True)
class DiskSettings:
    """A disk tier: a directory of its own, and how many bytes of it to take.

    compress: whether chunks are compressed there (tiers/compressing.py).
    """

    directory: str
    bytes: int
    threads: int = 4
    compress: Compress = "auto"


@dataclass(frozen=True, slots=True)
class L2Settings:
    """A store that replicas share.

    url:     redis://, rediss://, file:///, s3:// or sagemaker-hyperpod://.
    options: of its client, by the names of its kind (l2/options.py), and LOG_PASSWORD.
    log:     url of a store that keeps the log of invalidations, where that of `url` can't.
    compress: whether chunks are compressed there (tiers/compressing.py).
    """

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    log: str | None = None
    threads: int = 4
    compress: Compress = "auto"

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
class AdminSettings:
    """Where an engine that hotspan's server does not start is administered by TCP.

    token_file: with the admin token; None for that of the environment, or one that is made at the start.
    """

    host: str
    port: int
    token_file: str | None = None


@dataclass(frozen=True, slots=True)
class BlendSettings:
    """Reuse of repeated text that is no prefix (docs/design/blend.md).

    mode:       "allowed" blends the requests that ask for it, the others all that do not refuse. They say which of the
                reused tokens are computed again: the first of each run, those that deviate most from what this prompt
                would give, or those of them that the question attends to.
    first_k:    tokens at the beginning of each reused run, for "first_k".
    recompute_ratio: the share of the reused tokens, for the others.
    check_layer: up to which the others compute all tokens before they choose, from 0; at least 1.
    min_tokens: fewer reused tokens are not worth it.
    separators: texts that windows never cross.
    check_every, min_agreement: one in so many blends is checked against a full prefill (0: none); with a lower share of
                that agree in the first token, nothing is blended any more.
    """

    mode: Literal["allowed", "first_k", "deviation", "query"] = "first_k"
    first_k: int = 16
    min_tokens: int = 512
    separators: tuple[str, ...] = ()
    check_every: int = 100
    min_agreement: float = 0.9
    recompute_ratio: float = 0.15
    check_layer: int = 2


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
    admin:        where an engine without hotspan's server takes commands by TCP, beside its Unix socket.
    is_served:    hotspan's server stands before the engine: what it says of a request's tenant is believed.
    is_strict:    only requests that the server has named a tenant for are cached.
    tenants:      those known at the start; others may come.
    retention:    rules over every request's own time to live.
    drain_s:      how long a stopping engine goes on writing to disk.
    patience_s:   None lets the cost model decide what is loaded from below RAM, and how long a request waits for it; a
                  number loads all that is there, and lets a request wait so long while nothing lands.
    error_file:   where an engine process writes why it refused to start, for the launcher to show.
    events_key:   a file with the key of KV events; None publishes them to whoever connects.
    blend:        reuse of repeated text that is no prefix; None leaves it out.
    prefetch_sessions: texts of sessions are brought into RAM before their next turns (cache/rhythm.py).
    encoder_outputs: outputs of the encoders of media are kept, where the engine can (engine/encoder/outputs.py).
    explain_requests: of each tenant, whose chunk names are kept to explain later requests (engine/explaining.py).
    without:      tiers that are not to be chosen where none is named: "disk", "l2".
    """

    ram_bytes: int
    disk: DiskSettings | None = None
    l2: L2Settings | None = None
    chunk_tokens: int = CHUNK_TOKENS
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
    blend: BlendSettings | None = None
    prefetch_sessions: bool = False
    encoder_outputs: bool = True
    explain_requests: int = 64
    without: tuple[str, ...] = ()
    admin: AdminSettings | None = None
    is_served: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dict that `from_json` takes, of JSON types only."""
        written: dict[str, Any] = _cache_settings().dump_python(self, mode="json")
        return written

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CacheSettings":
        """The settings that `to_json` gave."""
        return _cache_settings().validate_python(data)


@functools.cache
def _cache_settings() -> "TypeAdapter[CacheSettings]":
    """What converts them, made once."""
    from pydantic import TypeAdapter  # no other command needs it

    return TypeAdapter(CacheSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """The options of `hotspan serve` for its tiers; without `ram_gib`, the size is chosen later."""

    ram_gib: float | None = option(
        4.0,
        "RAM tier, in GiB of /dev/shm.",
        kind=kinds.GIB,
        shown="what the model can use, at most a quarter of what is free; 4.0 beside other tiers",
        lmcache=Spelling("max_local_cpu_size"),
    )
    disk: Path | None = option(
        None, "Disk tier: a directory of its own, preferably on NVMe.", lmcache=Spelling("local_disk")
    )
    disk_gib: float | None = option(
        None, "Disk tier, in GiB at most; grows with use.", kind=kinds.GIB, lmcache=Spelling("max_local_disk_size")
    )
    disk_compress: Compress = option(
        "auto",
        "Whether chunks are compressed, without loss, on disk: auto compresses where the disk is slow enough that "
        "loading them is faster then; always wherever they shrink by 5 %, so that the disk holds more. Both are read "
        "in each mode.",
    )
    l2: str | None = option(
        None,
        "Cache shared by replicas: sagemaker-hyperpod://HOST:9200 (`hotspan daemon`, or SageMaker "
        "HyperPod's), redis:// or rediss://HOST:PORT, file:///SHARED/DIRECTORY or s3://BUCKET/PREFIX.",
        lmcache=Spelling("remote_url"),
    )
    l2_option: Mapping[str, str] | None = option(
        None,
        "Option of the L2's client, such as timeout_ms=1000 (docs/configuration.md lists them). May be repeated.",
        kind=kinds.PAIRS,
        lmcache=Spelling("extra_config"),
    )
    l2_log: str | None = option(
        None,
        "Store for the log of invalidations, where the L2 keeps none (SageMaker's own daemon): redis:// or file:///.",
    )
    l2_compress: Compress = option(
        "auto",
        "Whether chunks are compressed, without loss, in the L2: auto compresses where its link is slow enough that "
        "loading them is faster then; always wherever they shrink by 5 %. Replicas read both in each mode.",
    )
    chunk_tokens: int = option(
        CHUNK_TOKENS,
        "Tokens per chunk, the unit that is stored and loaded; what follows a text's last whole chunk is computed.",
        kind=kinds.COUNT,
        lmcache=Spelling("chunk_size"),
    )
    prompts_only: bool = option(
        False, "Store the KV of prompts only, not of answers.", lmcache=Spelling("save_decode_cache", kinds.INVERTED)
    )
    model_digest: ModelDigest = option(
        "full",
        "How weights are told apart: full reads all bytes, once per file; sampled is faster and misses edits in place.",
    )
    no_cache: bool = option(False, "Serve with the engine's own prefix cache only, without hotspan's tiers.")
    persistence: Persistence = option(
        "tiers", "tiers, or none: nothing is written outside memory; --disk and --l2 are refused."
    )
    kek: str | None = option(
        None, "Key-encryption key for all data that leaves RAM: file:PATH, env:NAME or aws-kms:KEY."
    )
    key_store: Path | None = option(None, "Directory with the tenants' wrapped keys, made by `hotspan keys init`.")
    kv_events_key: Path | None = option(
        None,
        "File (0600) with the key of KV events, at least 32 characters: only routers that have it can follow them.",
    )
    tenants: Path | None = option(
        None, "YAML file with API keys, shares and times to live per tenant. With it, every client needs a key."
    )
    share_across_tenants: bool = option(
        False, "Share cached texts between tenants. Tenants can then detect each other's texts by timing."
    )
    blend: Blend = option(
        "off",
        "Reuse repeated text that is no prefix, such as documents in another order: off; allowed, for requests that "
        "ask for it; first_k, deviation or query, for all that do not refuse: which of the reused tokens are computed "
        "again. Answers are approximate. CPU engines only.",
        lmcache=Spelling("enable_blending", kinds.BLENDING),
    )
    blend_first_k: int = option(
        16,
        "Tokens at the beginning of each reused piece of text that are computed again (--blend).",
        kind=kinds.COUNT,
    )
    blend_recompute_ratio: float = option(
        0.15,
        "Share of the reused tokens that are computed again (--blend deviation, --blend query).",
        kind=kinds.FRACTION,
        lmcache=Spelling("blend_recompute_ratios", kinds.FIRST_NUMBER),
    )
    blend_check_layer: int = option(
        2,
        "Layer, counted from 0, up to which all tokens are computed before those are chosen that are computed in all "
        "layers (--blend deviation, --blend query).",
        kind=kinds.COUNT,
        lmcache=Spelling("blend_check_layers", kinds.FIRST_INTEGER),
    )
    blend_min_tokens: int = option(
        512,
        "Fewer reused tokens are not worth blending (--blend).",
        kind=kinds.COUNT,
        lmcache=Spelling("blend_min_tokens"),
    )
    blend_separator: tuple[str, ...] | None = option(
        None,
        "Text between documents, which no reused piece crosses (--blend). May be repeated.",
        kind=kinds.VERBATIM,
        lmcache=Spelling("blend_special_str"),
    )
    blend_check_every: int = option(
        100,
        "One in so many blended prompts is also computed in full, after its answer, and the first token compared; "
        "0: none (--blend).",
        kind=kinds.NATURAL,
    )
    blend_min_agreement: float = option(
        0.9,
        "If certainly fewer of the last 500 of these agree, as a share, blending turns itself off (--blend).",
        kind=kinds.FRACTION,
    )
    prefetch_sessions: bool = option(
        False,
        "Bring the text of a session's next turn from disk or L2 into RAM shortly before it comes, for sessions whose "
        "turns come regularly; paused by itself while too little of it is used.",
    )
    explain_requests: int = option(
        64,
        "Requests of each tenant whose chunk names, and no text, are kept to tell why later requests were no hits "
        "(`hotspan cache explain`); 0: none, and nothing is explained.",
        kind=kinds.NATURAL,
    )
    patience_s: float | None = option(
        None,
        "Load all that is found below RAM, however slow that is, and let a request wait so many seconds while nothing "
        "arrives. Without it, the cost model decides for each request what is loaded and how long it waits.",
        kind=kinds.SECONDS,
        shown="the cost model decides",
    )
    auto: bool = option(
        False,
        "Choose the tiers that nothing else names, a disk tier included, by what the machine has free. "
        "Without it and without any tier named: RAM only, as much as the model can use and at most a quarter "
        "of what is free.",
        lmi=names("option.lmcache_auto_config"),
    )
    lmcache_config_file: Path | None = option(
        None,
        "LMCache's YAML file; in LMI's configuration, relative to the model's directory.",
        lmi=names("option.lmcache_config_file"),
        variables=names("LMCACHE_CONFIG_FILE"),
    )

    def settings(
        self,
        *,
        is_strict: bool = False,
        tenants: tuple[TenantShare, ...] = (),
        retention: tuple[RetentionRule, ...] = (),
    ) -> CacheSettings:
        """The settings of the tiers, with what the file of tenants gives.

        Raises: ConfigError that says which option is wrong and what would do.
        """
        check(self)
        self._check_sizes()
        self._check_combinations()
        disk = None
        if self.disk is not None and self.disk_gib is not None:
            directory = str(self.disk.expanduser().absolute())
            disk = DiskSettings(directory, int(self.disk_gib * GIB), compress=self.disk_compress)
        return CacheSettings(
            ram_bytes=0 if self.ram_gib is None else int(self.ram_gib * GIB),
            disk=disk,
            l2=None
            if self.l2 is None
            else L2Settings(self.l2, dict(self.l2_option or {}), self.l2_log, compress=self.l2_compress),
            chunk_tokens=self.chunk_tokens,
            prompts_only=self.prompts_only,
            model_digest=self.model_digest,
            persistence=self.persistence,
            encryption=_encryption(self.kek, self.key_store),
            is_isolated=not self.share_across_tenants,
            is_strict=is_strict,
            tenants=tenants,
            retention=retention,
            events_key=None if self.kv_events_key is None else self.kv_events_key.expanduser().absolute(),
            blend=self._blend(),
            prefetch_sessions=self.prefetch_sessions,
            explain_requests=self.explain_requests,
            patience_s=self.patience_s,
        )

    def _blend(self) -> BlendSettings | None:
        if self.blend == "off":
            return None
        return BlendSettings(
            self.blend,
            self.blend_first_k,
            self.blend_min_tokens,
            tuple(self.blend_separator or ()),
            self.blend_check_every,
            self.blend_min_agreement,
            self.blend_recompute_ratio,
            self.blend_check_layer,
        )

    def _check_sizes(self) -> None:
        if self.ram_gib is not None and not 0 < self.ram_gib <= _MAX_GIB:
            raise ConfigError(
                f"--ram-gib is {self.ram_gib:g}: hotspan needs RAM to pass chunks through, give at least what the "
                "requests in flight need (tokens x KV bytes per token), or --no-cache to serve without hotspan's tiers"
            )
        if (self.disk is None) != (self.disk_gib is None):
            missing, given = ("--disk-gib", "--disk") if self.disk_gib is None else ("--disk", "--disk-gib")
            raise ConfigError(f"{given} is given without {missing}: a disk tier needs a directory and a size")
        if self.disk_gib is not None and not 0 < self.disk_gib <= _MAX_GIB:
            raise ConfigError(f"--disk-gib is {self.disk_gib:g}: give the size of the disk tier in GiB, above 0")
        if self.disk is None and self.disk_compress != "auto":
            raise ConfigError("--disk-compress belongs to a disk tier: name its directory with --disk")

    def _check_combinations(self) -> None:
        for tier, does in ((self.disk and "--disk", "writes it down"), (self.l2 and "--l2", "sends it away")):
            if self.persistence == "none" and tier:
                raise ConfigError(
                    f"--persistence none keeps KV in memory only, and {tier} {does}: leave one of them out"
                )
        if self.l2 is None and (self.l2_option or self.l2_log is not None or self.l2_compress != "auto"):
            raise ConfigError("--l2-option, --l2-log and --l2-compress belong to an L2: name it with --l2")
        if self.l2_log is None and LOG_PASSWORD in (self.l2_option or {}):
            raise ConfigError(f"--l2-option {LOG_PASSWORD} belongs to a log of its own: name that with --l2-log")
        if (self.kek is None) != (self.key_store is None):
            missing, given = ("--key-store", "--kek") if self.key_store is None else ("--kek", "--key-store")
            raise ConfigError(f"{given} is given without {missing}: `hotspan keys init` makes a key store for a KEK")


def _encryption(kek: str | None, key_store: Path | None) -> EncryptionSettings | None:
    if kek is None or key_store is None:
        return None
    if kek.startswith("file:"):  # the engine's processes may run in another directory
        kek = f"file:{Path(kek.removeprefix('file:')).expanduser().absolute()}"
    return EncryptionSettings(kek, str(key_store.expanduser().absolute()))
