"""What the cache counts. Tokens are those of whole chunks; every fault that became a miss is here."""

from collections import Counter
from dataclasses import dataclass, field

from hotspan.core.types import Tier
from hotspan.tiers.base import Transfer


@dataclass(slots=True)
class CacheStats:
    """Counts since the last `take`.

    Hit tokens, bytes and seconds, evictions, refusals and what left RAM before a tier took it are by tier; faults by
    (tier, fault). Blends by what became of them, their tokens by kind, their checks by result; `is_blending` and what
    the last checks found where that changed.
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
    cuts: int = 0
    blends: Counter[str] = field(default_factory=Counter)
    blended_tokens: Counter[str] = field(default_factory=Counter)
    blend_seconds: float = 0.0
    windows_stored: int = 0
    encoder_hits: Counter[Tier] = field(default_factory=Counter)
    encoder_misses: int = 0
    encoder_load_bytes: int = 0
    encoder_store_bytes: int = 0
    is_blending: bool | None = None
    blend_checks: Counter[str] = field(default_factory=Counter)
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

    def loaded(self, tier: Tier, size: int, seconds: float) -> None:
        """One chunk came up from `tier`."""
        self.load_bytes[tier] += size
        self.load_seconds.setdefault(tier, []).append(seconds)
