"""R12: chunks of all types, compressed and restored: every bit is the same. Damaged ones are a miss, or the same."""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from hotspan.core.compression import compress, decompress
from hotspan.core.types import MIB, PAGE_BYTES
from kit.proof import Findings, Progress, Proof, rng_of

KINDS = ("bfloat16", "float16", "float32", "fp8", "noise", "equal")
_SPECIAL = {
    "bfloat16": [0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF],
    "float16": [0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF],
    "float32": [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001],
    "fp8": [0x00, 0x80, 0x01, 0x87, 0x7F, 0xFF, 0x78, 0xF8],
    "noise": [0x00, 0xFF],
}
"""Zeros of both signs, denormals, infinities, quiet and signalling NaNs."""

_SPECIALS = 16
_CHANNELS = 64
_MAX_BYTES, _RARE_BYTES = 16 * PAGE_BYTES, 2 * MIB
_RARE = 1 / 1000
_NORMALS = np.random.default_rng(0).standard_normal(1 << 20, np.float32)


@dataclass(frozen=True, slots=True)
class Options:
    """cases: chunks. only: the number of the one to run."""

    seed: int = 0
    cases: int = 1_000_000
    only: int | None = None


def numbers(kind: str, count: int, rng: random.Random, spread: float = 1.0) -> bytearray:
    """Numbers as KV has them: normal, each channel of a scale of its own, and a few special ones among them."""
    if kind == "equal":
        return bytearray([rng.randrange(256)]) * count
    if kind == "noise":
        return bytearray(rng.randbytes(count))
    first = rng.randrange(len(_NORMALS) - min(count, len(_NORMALS)) + 1)
    values = np.resize(_NORMALS[first : first + count], count)
    with np.errstate(all="ignore"):  # infinities are welcome
        scales = np.exp([spread * rng.gauss(0, 1) for _ in range(_CHANNELS)]).astype(np.float32)
        values = values * np.resize(scales, count)
    words = values.view(np.uint32)
    made: npt.NDArray[Any]
    if kind == "bfloat16":
        made = (words >> 16).astype(np.uint16)
    elif kind == "float16":
        made = np.nan_to_num(values, posinf=6e4, neginf=-6e4).clip(-6e4, 6e4).astype(np.float16).view(np.uint16)
    elif kind == "fp8":
        made = ((words >> 24) & 0x80 | ((words >> 20) & 0x7F)).astype(np.uint8)
    else:
        made = words.copy()
    for _ in range(min(count, rng.randrange(_SPECIALS))):
        made[rng.randrange(count)] = rng.choice(_SPECIAL[kind])
    return bytearray(made.tobytes())


def run(options: Options, progress: Progress) -> Proof:
    """All cases, or one."""
    findings, counts = Findings(), Counter[str]()
    cases = range(options.cases) if options.only is None else [options.only]
    for done, case in enumerate(cases):
        _try(case, rng_of("compression", options.seed, case), findings, counts)
        progress(done, len(cases))
    counts["cases"] = len(cases)
    passed = not findings.count and (options.only is not None or all(counts[kind] for kind in KINDS))
    claim = "every bit of a chunk comes back from its compressed form, and a damaged one gives no other"
    return Proof("compression", claim, dict(sorted(counts.items())), passed, tuple(findings.kept))


def _try(case: int, rng: random.Random, findings: Findings, counts: Counter[str]) -> None:
    kind = rng.choice(KINDS)
    most = _RARE_BYTES if rng.random() < _RARE else _MAX_BYTES
    payload = numbers(kind, rng.randrange(most // 2), rng, rng.choice([0.0, 1.0, 1.0, 3.0, 30.0]))
    payload += rng.randbytes(rng.choice([0, 0, 0, rng.randrange(8)]))
    room, into = memoryview(bytearray(len(payload))), memoryview(bytearray(len(payload)))
    size = compress(memoryview(payload), room)
    counts[kind] += 1
    if not size:
        counts["left as they are"] += 1
        return
    if not decompress(room[:size], into) or into != payload:
        findings.add(case, f"{len(payload)} bytes of {kind} did not come back")
    at = rng.randrange(size)
    room[at] ^= 1 << rng.randrange(8)
    counts["damaged"] += 1
    if not decompress(room[:size], into):
        counts["damaged and refused"] += 1
    elif into != payload:
        findings.add(case, f"{len(payload)} bytes of {kind} with a bit of stored byte {at} flipped gave others")
