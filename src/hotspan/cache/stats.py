"""What the cache counts. Tokens are those of whole chunks; every fault that became a miss is here."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from hotspan.core.types import Tier
from hotspan.tiers.base import Fault, Losses, Transfer
from hotspan.tiers.compressing import Packing

Prefetched = Literal["started", "used", "unused"]
TurnResult = Literal["used", "unused", "paused"]
BlendCheck = Literal["agreed", "differed", "left_out"]


@dataclass(slots=True)
class CacheStats:
    """Counts since the last `take`.

    Hit tokens, bytes and seconds, evictions, refusals and what left RAM before a tier took it are by tier; faults by
    (tier, fault). Computed tokens by reason (reasons.py). What tiers compress by (tier, what): chunks stored by what
    was chosen, bytes of those that were compressed as chunks and as stored, seconds of encoding and decoding. Chunks
    that were prefetched by what became of them: started, used, unused; next turns of sessions that were announced:
    used, unused, and how often that was paused. Blends by what became of them, their tokens by kind, their checks by
    result; `is_blending` and what the last checks found where that changed. Namespaces that began, by what they were
    named after, and whether there is one, where that changed.
    """

    lookup_tokens: int = 0
    hit_tokens: Counter[Tier] = field(default_factory=Counter)
    load_bytes: Counter[Tier] = field(default_factory=Counter)
    store_bytes: Counter[Tier] = field(default_factory=Counter)
    load_seconds: dict[Tier, list[float]] = field(default_factory=dict)
    store_seconds: dict[Tier, list[float]] = field(default_factory=dict)
    faults: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    evictions: Counter[Tier] = field(default_factory=Counter)
    stores_refused: Counter[Tier] = field(default_factory=Counter)
    stores_late: Counter[Tier] = field(default_factory=Counter)
    expired: Counter[Tier] = field(default_factory=Counter)
    invalidated: Counter[Tier] = field(default_factory=Counter)
    compression_chunks: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    compression_bytes: Counter[tuple[Tier, str]] = field(default_factory=Counter)
    compression_seconds: dict[tuple[Tier, str], float] = field(default_factory=dict)
    cuts: int = 0
    computed_tokens: Counter[str] = field(default_factory=Counter)
    prefetches: Counter[Prefetched] = field(default_factory=Counter)
    turns: Counter[TurnResult] = field(default_factory=Counter)
    blends: Counter[str] = field(default_factory=Counter)
    blended_tokens: Counter[str] = field(default_factory=Counter)
    blend_seconds: float = 0.0
    windows_stored: int = 0
    encoder_hits: Counter[Tier] = field(default_factory=Counter)
    encoder_misses: int = 0
    encoder_load_bytes: int = 0
    encoder_store_bytes: int = 0
    namespaces: Counter[str] = field(default_factory=Counter)
    weights_known: bool | None = None
    is_blending: bool | None = None
    blend_checks: Counter[BlendCheck] = field(default_factory=Counter)
    blend_agreement: float | None = None
    blend_kl: float | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return self == CacheStats()

    def take(self) -> "CacheStats":
        """The counts so far; they begin anew."""
        taken = CacheStats()
        for name in CacheStats.__slots__:
            fresh = getattr(taken, name)
            setattr(taken, name, getattr(self, name))
            setattr(self, name, fresh)
        return taken

    def moved(self, tier: Tier, transfer: Transfer) -> None:
        """A transfer from or to a lower tier ended."""
        if transfer.fault is not None:
            self.faults[tier, transfer.fault.value] += 1
        elif transfer.is_load:
            self.loaded(tier, transfer.bytes, transfer.seconds)
        else:
            self.store_bytes[tier] += transfer.bytes
            self.store_seconds.setdefault(tier, []).append(transfer.seconds)
        if transfer.packing is not None:
            self._packed(tier, transfer, transfer.packing)

    def lost(self, tier: Tier, losses: Losses) -> None:
        """A lower tier gave up chunks by itself."""
        for counted, count in ((self.evictions, losses.evicted), (self.expired, losses.expired)):
            if count:
                counted[tier] += count
        if losses.quarantined:
            self.faults[tier, Fault.CORRUPT.value] += losses.quarantined

    def loaded(self, tier: Tier, size: int, seconds: float) -> None:
        """One chunk came up from `tier`."""
        self.load_bytes[tier] += size
        self.load_seconds.setdefault(tier, []).append(seconds)

    def _packed(self, tier: Tier, transfer: Transfer, packing: Packing) -> None:
        what = tier, "decode" if transfer.is_load else "encode"
        if packing.seconds:
            self.compression_seconds[what] = self.compression_seconds.get(what, 0.0) + packing.seconds
        if not transfer.is_load:
            self.compression_chunks[tier, packing.choice] += 1
            if packing.is_compressed:
                self.compression_bytes[tier, "chunks"] += transfer.bytes
                self.compression_bytes[tier, "stored"] += packing.stored_bytes
