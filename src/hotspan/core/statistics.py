"""What a few observations of a share allow to conclude."""

from math import sqrt

_Z = 1.645
"""One-sided 95 % of a normal distribution."""


def at_most(count: int, total: int) -> float:
    """The share, at most, of which `count` of `total` were seen, with 95 % certainty (Wilson's bound)."""
    share, z2 = count / total, _Z * _Z
    spread = _Z * sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    return min(1.0, (share + z2 / (2 * total) + spread) / (1 + z2 / total))
