"""What a simulated replica costs and holds."""

from dataclasses import dataclass, field

from hotspan.config.kinds import COUNT, NOT_NEGATIVE, POSITIVE, between
from hotspan.config.options import check, option
from hotspan.core.errors import ConfigError
from hotspan.core.trace import BLOCK_TOKENS
from hotspan.core.types import GIB
from hotspan.router.types import Medium
from hotspan.simulate.caches import EVICTIONS

GB = 10**9
_SHARE = between(0, 1, float)


@dataclass(frozen=True, slots=True)
class Costs:
    """How long a replica takes.

    step_tokens:   of a step that prefills. Each request that decodes has one of them, so that n slow the prefill down
                   by n / step_tokens; and each gets its token once in such a step.
    load_s:        before the first byte from a medium comes.
    """

    prefill_tokens_per_s: float = option(8000.0, "Prefill rate of one replica, in tokens per second.", kind=POSITIVE)
    attention_s: float = option(0.0, "Attention cost, in seconds per token and preceding token.", kind=NOT_NEGATIVE)
    latency_s: float = option(
        0.0, "Time to the first token outside the engine's work, such as tokenization, in seconds.", kind=NOT_NEGATIVE
    )
    step_s: float = option(
        0.02, "Duration of a decoding step with one request, in seconds.", name="decode_step_s", kind=POSITIVE
    )
    request_step_s: float = option(
        0.0002, "Added duration of a decoding step per further request, in seconds.", kind=NOT_NEGATIVE
    )
    step_tokens: int = option(512, "Maximum number of tokens per step, as --max-num-batched-tokens.", kind=COUNT)
    max_running: int = option(256, "Maximum number of concurrent requests per replica, as --max-num-seqs.", kind=COUNT)
    kv_bytes: int = option(
        128 * 1024, "KV cache size per token, in bytes (`hotspan plan MODEL` prints it).", kind=COUNT
    )
    ram_gb_per_s: float = option(20.0, "Transfer rate from RAM to the GPU, in GB/s.", kind=POSITIVE)
    disk_gb_per_s: float = option(3.0, "Transfer rate from disk to the GPU, in GB/s.", kind=POSITIVE)
    l2_gb_per_s: float = option(1.5, "Transfer rate from the L2 to the GPU, in GB/s.", kind=POSITIVE)
    load_s: dict[Medium, float] = field(default_factory=lambda: {Medium.RAM: 0.0, Medium.DISK: 0.001, Medium.L2: 0.005})

    def __post_init__(self) -> None:
        check(self)
        if min(self.load_s.values()) < 0:
            raise ConfigError("times of a replica can't be negative")

    @property
    def load_gb_per_s(self) -> dict[Medium, float]:
        """From each medium to the GPU."""
        return {Medium.RAM: self.ram_gb_per_s, Medium.DISK: self.disk_gb_per_s, Medium.L2: self.l2_gb_per_s}

    def prefill_s(self, start: int, end: int) -> float:
        """To compute the tokens [start, end) of a prompt, alone."""
        return (end - start) / self.prefill_tokens_per_s + self.attention_s * (end * end - start * start) / 2

    def loading_s(self, medium: Medium, tokens: int) -> float:
        """To load so many tokens."""
        if not tokens:
            return 0.0
        return self.load_s[medium] + tokens * self.kv_bytes / (self.load_gb_per_s[medium] * GB)


@dataclass(frozen=True, slots=True)
class Blend:
    """What `--blend` of a replica costs. The defaults are measured: `first_k`, prompts of 8,000 tokens
    (benchmarks/results/blend-quality.json).
    """

    recompute_ratio: float = option(
        0.01,
        "With --blend, the share of the tokens taken from windows that is computed again. The default is what first_k "
        "computes of long documents.",
        name="blend_recompute_ratio",
        kind=_SHARE,
    )
    probe_share: float = option(
        0.0,
        "With --blend, the cost of choosing these tokens, as a share of the prefill: 0 for first_k.",
        name="blend_probe_share",
        kind=_SHARE,
    )
    move_share: float = option(
        0.05,
        "With --blend, the cost of rotating and copying a token of a window, as a share of computing it.",
        name="blend_move_share",
        kind=_SHARE,
    )

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a replica holds; L2 is one for all.

    eviction: of the tiers below the GPU, "arc" as hotspan's, "lru", or "learned" from how requests end
              (tiers/retention.py); the engine's own pool is always LRU.
    replicas: number of them; None is as the setup says.
    """

    gpu_tokens: int = 750_000
    ram_gib: float = 0.0
    disk_gib: float = 0.0
    l2_gib: float = 0.0
    eviction: str = "arc"
    replicas: int | None = None

    def __post_init__(self) -> None:
        if min(self.gpu_tokens, self.ram_gib, self.disk_gib, self.l2_gib) < 0:
            raise ConfigError("a tier's size can't be negative")

    def tokens(self, medium: Medium, costs: Costs) -> int:
        """How many fit."""
        if medium is Medium.GPU:
            return self.gpu_tokens
        gib = {Medium.RAM: self.ram_gib, Medium.DISK: self.disk_gib, Medium.L2: self.l2_gib}[medium]
        return int(gib * GIB / costs.kv_bytes)

    def label(self) -> str:
        """What tells it from others, in a few words."""
        parts = [f"GPU {self.gpu_tokens / 1000:,.0f}K tokens"]
        for name, gib in (("RAM", self.ram_gib), ("disk", self.disk_gib), ("L2", self.l2_gib)):
            if gib:
                parts.append(f"{name} {gib:g} GiB")
        evicted = [self.eviction] if len(parts) > 1 else []
        counted = [] if self.replicas is None else [f"{self.replicas} replica{'s' * (self.replicas > 1)}"]
        return ", ".join((*parts, *evicted, *counted))


@dataclass(frozen=True, slots=True)
class Setup:
    """What a trace is replayed over.

    event_delay_s: from a change in a replica's caches to the router; None: no events at all.
    block_tokens:  of the trace's blocks. gpu_block_tokens: of the engine's.
    blend:         replicas reuse sections of prompts wherever these stand, and tell nothing of their caches.
    """

    replicas: int = 8
    costs: Costs = field(default_factory=Costs)
    sizes: Sizes = field(default_factory=Sizes)
    event_delay_s: float | None = 0.005
    block_tokens: int = BLOCK_TOKENS
    gpu_block_tokens: int = 16
    blend: Blend | None = None

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError("a simulation needs at least 1 replica")
        if self.sizes.eviction not in EVICTIONS:
            raise ConfigError(f"there is no eviction {self.sizes.eviction!r}; there are {', '.join(EVICTIONS)}")
        if self.sizes.gpu_tokens < self.block_tokens:
            raise ConfigError(f"a GPU's pool of {self.sizes.gpu_tokens} tokens holds no block of {self.block_tokens}")
        if self.blend is not None and not self.sizes.ram_gib:
            raise ConfigError("--blend keeps windows in RAM: give --ram-gib")

    @property
    def events_s(self) -> float | None:
        """From a change in a replica's caches to the router; None: no events. Engines with events do not blend."""
        return self.event_delay_s if self.blend is None else None
