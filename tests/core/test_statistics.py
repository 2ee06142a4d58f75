"""What a few observations allow to conclude."""

import math

import pytest

from hotspan.core.statistics import at_most


def test_what_may_be_chance_is_no_conclusion() -> None:
    """Seventeen of twenty may be nine of ten; 75 of 100 are not."""
    assert at_most(17, 20) > 0.9 > at_most(75, 100)
    assert at_most(500, 500) == pytest.approx(1.0) and at_most(0, 10) < 0.3
    assert math.isclose(at_most(90, 100), 0.940, abs_tol=0.002)
