"""Machines to plan for that are not this one, the pool of an engine on their GPUs, and what they cost per hour."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.core.types import GIB
from hotspan.plan.disk import DiskProbe
from hotspan.plan.host import Host
from hotspan.plan.memory import Available, SharedMemory
from hotspan.plan.mounts import Medium

GPU_MEMORY_UTILIZATION: Final = 0.92
"""vLLM's default for --gpu-memory-utilization."""

_RANK_BYTES: Final = GIB // 4
"""Activations and CUDA graphs of one rank. This and the next reproduce the published pools (docs/sizing.md)."""

_PEER_BYTES: Final = GIB // 2
"""Buffers of one rank to communicate, if there are several."""

EFFICIENCY: Final = 0.5
"""Share of the data sheet's FLOPS that a prefill reaches. An assumption: a measured rate is better."""

_SHIPPED: Final = Path(__file__).with_name("machines.toml")


@dataclass(frozen=True, slots=True)
class Gpu:
    """memory_gib: total, as CUDA reports it. tflops: dense bfloat16. host_gb_s: from the host's memory."""

    memory_gib: float
    tflops: float
    host_gb_s: float


@dataclass(frozen=True, slots=True)
class Price:
    """What one machine costs, who says so, and when."""

    usd_per_hour: float
    source: str
    date: str = ""

    def __str__(self) -> str:
        when = f", {self.date}" if self.date else ""
        return f"{self.usd_per_hour:.2f} USD per hour ({self.source}{when})"


@dataclass(frozen=True, slots=True)
class Machine:
    """One type of machine."""

    name: str
    gpu: Gpu
    gpus: int
    memory_gib: float
    disk_gb: float

    def host(self) -> Host:
        """It, with nothing running: all memory available, also in /dev/shm, the drives empty and as one directory."""
        memory, disk = int(self.memory_gib * GIB), int(self.disk_gb * 1e9)
        drive = DiskProbe(Path("/nvme"), "file system", Medium.NVME, disk, 0, is_direct=True)
        return Host(Available(memory, f"memory of {self.name}"), SharedMemory(memory, memory), (drive,) if disk else ())

    def pool_bytes(self, weights_bytes: int, ranks: int, utilization: float = GPU_MEMORY_UTILIZATION) -> int:
        """KV cache of an engine on `ranks` of its GPUs, as vLLM sizes it; an estimate of what is left there.

        Raises: ConfigError if there are too few GPUs, or the weights do not fit.
        """
        if ranks > self.gpus:
            raise ConfigError(f"{self.name} has {self.gpus} GPUs and the engine needs {ranks}: lower --tp")
        overhead = ranks * (_RANK_BYTES + (_PEER_BYTES if ranks > 1 else 0))
        left = int(ranks * utilization * self.gpu.memory_gib * GIB) - weights_bytes - overhead
        if left <= 0:
            raise ConfigError(
                f"{weights_bytes / GIB:.1f} GiB of weights do not fit {ranks} x {self.gpu.memory_gib:g} GiB: raise --tp"
            )
        return left

    def prefill_tokens_per_s(self, weights_bytes: int, ranks: int) -> float | None:
        """Estimate for a dense 16-bit model: two FLOPs per parameter, thus one per byte. None without weights."""
        return ranks * self.gpu.tflops * 1e12 * EFFICIENCY / weights_bytes if weights_bytes else None


def machine(name: str) -> Machine:
    """The machine of that name. Raises: ConfigError if there is none."""
    known = _read(_SHIPPED)
    if name not in known["machines"]:
        names = ", ".join(known["machines"])
        hint = did_you_mean(
            name, known["machines"], f"known are {names}; for others leave it out, and give their rates"
        )
        raise ConfigError(f"--machine {name} is not known: {hint}")
    fields = known["machines"][name]
    return msgspec.convert({**fields, "name": name, "gpu": known["gpus"][fields["gpu"]]}, Machine)


def price(machine: str | None, hourly: float | None, file: Path | None) -> Price | None:
    """The price of a machine: as given, else of the user's file, else of the shipped one; None if nobody says.

    Raises: ConfigError if the file can't be read, or has no price of the machine.
    """
    if hourly is not None:
        return Price(hourly, "as given")
    if file is None:
        found = _read(_SHIPPED)["prices"].get(machine)
        return None if found is None else msgspec.convert(found, Price)
    prices = _read(file).get("prices", {})
    if machine is None or machine not in prices:
        raise ConfigError(f"{file} has no [prices.{machine!r}]: name the machine with --machine, or add its price")
    try:
        return msgspec.convert(prices[machine], Price)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: prices of {machine}: {error}; usd_per_hour, source and date are needed") from error


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read as TOML: {error}") from error
