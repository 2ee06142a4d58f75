"""What a simulated replica costs and holds."""

from dataclasses import dataclass, field

from hotspan.config.kinds import COUNT, NOT_NEGATIVE, POSITIVE
from hotspan.config.options import check, option
from hotspan.core.errors import ConfigError
from hotspan.core.trace import BLOCK_TOKENS
from hotspan.core.types import GIB
from hotspan.router.types import Medium

GB = 10**9


@dataclass(frozen=True, slots=True)
class Costs:
    """How long a replica takes.

    step_tokens:   of a step that prefills. Each request that decodes has one of them, so that n slow the prefill down
                   by n / step_tokens; and each gets its token once in such a step.
    load_s:        before the first byte from a medium comes.
    """

    prefill_tokens_per_s: float = option(8000.0, "Prefill rate of one replica, in tokens per second.", kind=POSITIVE)
    attention_s: float = option(0.0, "Attention cost, in seconds per token and preceding token.", kind=NOT_NEGATIVE)
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

    def loading_s(self, medium: Medium, blocks: int) -> float:
        """To load so many blocks."""
        if not blocks:
            return 0.0
        return self.load_s[medium] + blocks * self.block_bytes / (self.load_gb_per_s[medium] * GB)

    @property
    def block_bytes(self) -> int:
        return self.kv_bytes * BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a replica holds; L2 is one for all.

    eviction: of the tiers below the GPU, "arc" as hotspan's or "lru"; the engine's own pool is always LRU.
    replicas: number of them; None is as the setup says.
    """

    gpu_tokens: int = 750_000
    ram_gib: float = 0.0
    disk_gib: float = 0.0
    l2_gib: float = 0.0
    eviction: str = "arc"
    replicas: int | None = None

    def __post_init__(self) -> None:
        if self.gpu_tokens < BLOCK_TOKENS:
            raise ConfigError(f"a GPU's pool of {self.gpu_tokens} tokens holds no block of {BLOCK_TOKENS}")
        if min(self.ram_gib, self.disk_gib, self.l2_gib) < 0:
            raise ConfigError("a tier's size can't be negative")

    def blocks(self, medium: Medium, costs: Costs) -> int:
        """How many fit."""
        if medium is Medium.GPU:
            return self.gpu_tokens // BLOCK_TOKENS
        gib = {Medium.RAM: self.ram_gib, Medium.DISK: self.disk_gib, Medium.L2: self.l2_gib}[medium]
        return int(gib * GIB / costs.block_bytes)

    def label(self) -> str:
        """What tells it from others, in a few words."""
        parts = [f"GPU {self.gpu_tokens / 1000:,.0f}K tokens"]
        for name, gib in (("RAM", self.ram_gib), ("disk", self.disk_gib), ("L2", self.l2_gib)):
            if gib:
                parts.append(f"{name} {gib:g} GiB")
        evicted = [self.eviction] if len(parts) > 1 else []
        counted = [] if self.replicas is None else [f"{self.replicas} replica{'s' * (self.replicas > 1)}"]
        return ", ".join((*parts, *evicted, *counted))
