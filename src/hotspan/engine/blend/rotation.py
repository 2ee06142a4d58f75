"""Keys moved to other positions: each layer's rotation, learnt from the engine's own keys, with a gate.

Rotary embeddings turn pairs of a key's elements by position x angle. The angles, and which elements are pairs, are
fitted to keys of one text at several positions, so that no model's code or scaling has to be known. What is not a
rotation by an angle per position (learnt positions, scaling that depends on the length) fits badly and is refused.
Attention scores depend on differences of positions alone, so a constant factor of the scaling (YaRN) stays as it is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import tau

import torch

FIT_SHIFTS = (1, 16, 256, 4096, 65536)
"""Shifts whose keys the angles are fitted to: each tells them 16 times as precisely as the one before. Those are left
out that the model's length does not allow.
"""

LIMITS = {torch.float32: 1e-3, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest relative residual of rotated keys, by their type: rounding of a key takes 2^-24, 2^-11 and 2^-8 at most."""

_VALUE_LIMITS = {torch.float32: 1e-2, torch.float16: 4e-2, torch.bfloat16: 1e-1}
"""The same for values, which a shift does not change but for rounding in the layers before."""

_NOISE = 4.0
"""How many times the residual of the values, that of the keys may be: both carry what earlier layers rounded."""


class Pairing(Enum):
    """Which elements of a key are turned together, of the first `size`.

    HALVES: i and i + size / 2 (Llama, GPT-NeoX). NEIGHBOURS: 2 i and 2 i + 1 (GPT-J, GLM). NONE: no element is.
    """

    HALVES = "halves"
    NEIGHBOURS = "neighbours"
    NONE = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """How a layer's keys depend on their position.

    size:   elements of a key, from the first, that are turned; the others do not depend on the position.
    angles: radians per position. Shape: float64[size / 2].
    """

    pairing: Pairing
    size: int
    angles: torch.Tensor

    def moved(self, keys: torch.Tensor, shift: int) -> torch.Tensor:
        """Keys as they are `shift` positions later. Shape: [..., head size], any floating type, kept.

        Computed in float32 from angles in float64. A shift of 0 gives the same bits.
        """
        if self.pairing is Pairing.NONE or shift == 0:
            return keys
        turn = torch.remainder(self.angles * shift, tau)
        cos, sin = turn.cos().to(keys.device, torch.float32), turn.sin().to(keys.device, torch.float32)
        first, second = _split(keys[..., : self.size].float(), self.pairing)
        turned = _merge(first * cos - second * sin, second * cos + first * sin, self.pairing)
        return torch.cat((turned.to(keys.dtype), keys[..., self.size :]), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    """A fitted rotation, and how far off it is at a shift that it was not fitted to.

    key_residual, value_residual: norm of the difference over the norm.
    dtype: of the keys.
    """

    rotation: Rotation
    key_residual: float
    value_residual: float
    dtype: torch.dtype

    @property
    def is_good(self) -> bool:
        """Whether keys may be moved by it: both residuals are what rounding explains."""
        limit = LIMITS.get(self.dtype)
        if limit is None:
            return False
        noise = _NOISE * self.value_residual
        return self.value_residual <= _VALUE_LIMITS[self.dtype] and self.key_residual <= max(limit, noise)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A layer's keys and values of one text that began at several positions.

    keys, values: by how much later it began; 0 and `check` among them. Shape: [tokens, KV heads, head size].
    check:        the shift that tests the fit: large, and not among those that it is fitted to.
    """

    keys: Mapping[int, torch.Tensor]
    values: Mapping[int, torch.Tensor]
    check: int


def fit_rotation(sample: Sample, like: Rotation | None = None) -> Fit:
    """The rotation that explains a layer's keys best; whether it is good enough says the fit.

    like: of the layer before; its pairing is taken without a search if that fits.
    Raises: ValueError if the sample lacks shift 0 or 1, or `check`.
    """
    if not {0, 1, sample.check} <= sample.keys.keys() or not {0, sample.check} <= sample.values.keys():
        raise ValueError(f"a rotation is fitted to the shifts 0 and 1 at least, and tested at {sample.check}")
    value_residual = residual(sample.values[0], sample.values[sample.check])
    best: Fit | None = None
    for pairing, size in _candidates(sample.keys[0].shape[-1], like):
        rotation = Rotation(pairing, size, _angles(sample, pairing, size))
        key_residual = residual(rotation.moved(sample.keys[0], sample.check), sample.keys[sample.check])
        fit = Fit(rotation, key_residual, value_residual, sample.keys[0].dtype)
        if best is None or key_residual < best.key_residual:
            best = fit
        if like is not None and pairing is like.pairing and size == like.size and fit.is_good:
            return fit
    assert best is not None  # there is always the candidate that turns nothing
    return best


def _candidates(head_size: int, like: Rotation | None) -> Iterator[tuple[Pairing, int]]:
    """What is tried, the likeliest first. Neighbours need no sizes: what is not turned has the angle 0."""
    if like is not None:
        yield like.pairing, like.size
    yield Pairing.NONE, 0
    yield Pairing.NEIGHBOURS, head_size // 2 * 2
    step = 2 if head_size <= 32 else 4
    yield from ((Pairing.HALVES, size) for size in range(head_size // step * step, 0, -step))


def _angles(sample: Sample, pairing: Pairing, size: int) -> torch.Tensor:
    """Radians per position: whole turns at a shift are known from smaller shifts, and the rest is measured."""
    angles = torch.zeros(size // 2, dtype=torch.float64)
    if pairing is Pairing.NONE:
        return angles
    start = _complex(sample.keys[0], pairing, size)
    for shift in sorted(sample.keys.keys() - {0, sample.check}):
        turned = _complex(sample.keys[shift], pairing, size)
        measured = torch.angle((start.conj() * turned).sum(tuple(range(start.dim() - 1))))
        expected = angles * shift
        angles = (expected + torch.remainder(measured - expected + tau / 2, tau) - tau / 2) / shift
    return angles


def _complex(keys: torch.Tensor, pairing: Pairing, size: int) -> torch.Tensor:
    return torch.complex(*_split(keys[..., :size].double().cpu(), pairing))


def _split(keys: torch.Tensor, pairing: Pairing) -> tuple[torch.Tensor, torch.Tensor]:
    """The first and the second element of each pair."""
    if pairing is Pairing.HALVES:
        first, second = keys.chunk(2, -1)
        return first, second
    return keys[..., 0::2], keys[..., 1::2]


def _merge(first: torch.Tensor, second: torch.Tensor, pairing: Pairing) -> torch.Tensor:
    if pairing is Pairing.HALVES:
        return torch.cat((first, second), -1)
    return torch.stack((first, second), -1).flatten(-2)


def residual(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm; infinite where there is no finite one."""
    difference = (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float(torch.nan_to_num(difference, nan=torch.inf))
