"""Which type of number this CPU computes with natively."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_BFLOAT16: Final = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags of /proc/cpuinfo, on x86-64 and on aarch64."""

_WITHOUT: Final = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA (oneDNN, "CPU Dispatcher Control") that leave bfloat16 instructions out."""

LIMIT: Final = "ONEDNN_MAX_CPU_ISA"


@dataclass(frozen=True, slots=True)
class NativeType:
    """A dtype to serve with on the CPU, and why."""

    dtype: str
    why: str

    @property
    def has_bfloat16(self) -> bool:
        return self.dtype == "bfloat16"


def native_type(environment: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")) -> NativeType:
    """bfloat16 where the CPU has instructions for it, else float32: emulated, bfloat16 takes over twice as long.

    environment: ONEDNN_MAX_CPU_ISA may forbid the instructions.
    """
    limit = environment.get(LIMIT, "").upper()
    if limit in _WITHOUT:
        return NativeType("float32", f"{LIMIT}={limit} leaves no bfloat16 instructions")
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return NativeType("bfloat16", "what this CPU can do is unknown")
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    found = sorted(_BFLOAT16 & flags)
    if found:
        return NativeType("bfloat16", f"this CPU has instructions for it ({', '.join(found)})")
    return NativeType("float32", "this CPU has no bfloat16 instructions, and emulates them")
