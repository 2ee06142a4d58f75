"""Byte planes: the bytes of numbers, apart by their place in the number, and numbers from them again.

    bfloat16, little-endian:  [m0 e0 m1 e1 m2 e2 ..]  ->  [m0 m1 m2 ..] [e0 e1 e2 ..]

The bytes with the exponents of KV carry about 3 bits each, those with the mantissas 8: apart, an entropy coder shrinks
the first, and the second need not be touched. How wide the numbers are is measured, and not told: a slot may hold
numbers of several types.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

WIDTHS = (1, 2, 4)
"""Bytes of a number, as far as it is taken apart."""

_SAMPLES, _SAMPLE_BYTES = 8, 1024
"""What the width is chosen by: 8 KiB of a piece, of which an estimate of the entropy is 0.1 bits off."""

_WORTH_BITS = 7.4
"""A plane whose bytes carry more is left as it is."""

_STEP = 1 << 16
"""Numbers that are put together at a time, in the CPU's first caches."""


def width_of(piece: Bytes) -> tuple[int, int]:
    """The width with which a piece is likely to shrink most, and which of its planes are (bit k: plane k)."""
    sample = _sampled(piece)
    best, chosen = float(len(sample)) * 8, (1, 0)
    for width in WIDTHS:
        if len(piece) % width:
            continue
        bits = [_entropy(sample[k::width]) for k in range(width)]
        size = sum(each if each < _WORTH_BITS else 8.0 for each in bits) * len(sample) / width
        if size < 0.99 * best:
            best, chosen = size, (width, sum(1 << k for k, each in enumerate(bits) if each < _WORTH_BITS))
    return chosen


def split(piece: Bytes, width: int, place: int, into: Bytes) -> None:
    """Fill `into` with one plane of a piece. Shape: into uint8[len(piece) / width]."""
    numbers: npt.NDArray[Any] = piece.view(f"<u{width}")
    if place:
        np.right_shift(numbers, 8 * place, out=into, casting="unsafe")
    else:
        np.copyto(into, numbers, casting="unsafe")


def join(planes: Sequence[Bytes], into: Bytes) -> None:
    """Fill `into` from the planes of its numbers. Shape: each uint8[len(into) / len(planes)]."""
    width = len(planes)
    if width == 1:
        np.copyto(into, planes[0])
        return
    numbers: npt.NDArray[Any] = into.view(f"<u{width}")
    for first in range(0, len(numbers), _STEP):
        part = numbers[first : first + _STEP]
        part[:] = planes[-1][first : first + _STEP]
        for plane in reversed(planes[:-1]):
            np.left_shift(part, 8, out=part)
            np.bitwise_or(part, plane[first : first + _STEP], out=part)


def _sampled(piece: Bytes) -> Bytes:
    """Runs of a piece, evenly spaced; each begins at a number."""
    if len(piece) <= _SAMPLES * _SAMPLE_BYTES:
        return piece[: len(piece) // WIDTHS[-1] * WIDTHS[-1] or len(piece)]
    step = len(piece) // _SAMPLES // _SAMPLE_BYTES * _SAMPLE_BYTES
    return np.concatenate([piece[n * step : n * step + _SAMPLE_BYTES] for n in range(_SAMPLES)])


def _entropy(plane: Bytes) -> float:
    """Bits a byte, as the bytes are distributed."""
    counts = np.bincount(plane, minlength=256)
    shares = counts[counts > 0] / max(len(plane), 1)
    return float(-(shares * np.log2(shares)).sum())
