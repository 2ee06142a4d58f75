"""How fast an engine computes a prompt and tiers load it, and where each figure comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Self

from hotspan.core.types import Tier
from hotspan.plan.advice import LATENCY_S
from hotspan.plan.machines import EFFICIENCY, Machine
from hotspan.plan.tiers import Reason

_NAMES = {Tier.RAM: "RAM rate", Tier.DISK: "disk rate", Tier.L2: "L2 rate"}
_SLOW_RAM = (
    "RAM's rate is that of copies into the engine, the disk's that of reads into RAM: a text on disk takes both, and "
    "comes later than one in RAM"
)
_ORDER = ("prefill rate", *_NAMES.values())


@dataclass(frozen=True, slots=True)
class Rates:
    """As far as they are known.

    gb_s:      of loads, by tier. latency_s: before the first byte of a load.
    sources:   where a rate comes from, by its name in the plan's table.
    """

    prefill_tokens_per_s: float | None = None
    gb_s: Mapping[Tier, float] = field(default_factory=dict)
    latency_s: Mapping[Tier, float] = field(default_factory=dict)
    sources: Mapping[str, str] = field(default_factory=dict)

    def updated(self, by: "Rates", source: str) -> Self:
        """These, with those of `by`, which come from `source`, in their place."""
        names = [_NAMES[tier] for tier in by.gb_s if tier in _NAMES]
        if by.prefill_tokens_per_s is not None:
            names.append("prefill rate")
        return type(self)(
            by.prefill_tokens_per_s or self.prefill_tokens_per_s,
            {**self.gb_s, **by.gb_s},
            {**self.latency_s, **by.latency_s},
            {**self.sources, **dict.fromkeys(names, source)},
        )

    def reasons(self) -> tuple[Reason, ...]:
        """A line of the plan's table for each."""
        values = {_NAMES[tier]: f"{rate:,.3g} GB/s" for tier, rate in self.gb_s.items() if tier in _NAMES}
        if self.prefill_tokens_per_s is not None:
            values["prefill rate"] = f"{self.prefill_tokens_per_s:,.0f} tokens/s"
        found = [Reason(name, values[name], self.sources[name]) for name in _ORDER if name in values]
        ram, disk = (self.gb_s.get(tier) for tier in (Tier.RAM, Tier.DISK))
        if ram is not None and disk is not None and ram <= disk:
            found.append(Reason("RAM and disk", f"{ram / disk:.2g} x the disk's rate", _SLOW_RAM))
        return tuple(found)


ASSUMED: Final = Rates(latency_s=LATENCY_S)
"""Before anything is known of machine and engine."""


def estimated(machine: Machine, weights_bytes: int, ranks: int) -> Rates:
    """Of an engine on `ranks` GPUs of a machine, from data sheets. weights_bytes: 0 if unknown."""
    gpus = f"{ranks} GPU{'s' if ranks != 1 else ''}"
    ram = Rates(gb_s={Tier.RAM: machine.gpu.host_gb_s * ranks})
    found = ASSUMED.updated(ram, f"estimate: 80 % of the PCIe link of {gpus}")
    prefill = machine.prefill_tokens_per_s(weights_bytes, ranks)
    why = f"estimate: a dense 16-bit model at {EFFICIENCY * 100:.0f} % of the FLOPS of {gpus}"
    return found if prefill is None else found.updated(Rates(prefill), why)
