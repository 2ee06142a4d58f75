"""The small version of benchmarks/timing.py."""

from pathlib import Path

import pytest

from benchmarks.timing import area_under_roc, measure
from tests.timing import TRIES

pytestmark = pytest.mark.engine

NOTHING = ((200, 0.62), (800, 0.56))
"""So many probes, and the area that chance gives them at most."""


def test_the_area_is_that_of_every_pair() -> None:
    """The rank formula agrees with counting pairs."""
    hits, misses = [1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 4.0]
    pairs = [(hit, miss) for hit in hits for miss in misses]
    counted = sum((hit < miss) + (hit == miss) / 2 for hit, miss in pairs) / len(pairs)
    assert area_under_roc(hits, misses) == pytest.approx(counted)
    assert area_under_roc([1.0], [2.0]) == 1.0


@pytest.mark.timing
def test_another_tenants_texts_can_not_be_told_from_new_ones(tiny_model: Path) -> None:
    """With isolation a probe's time says nothing; with sharing the same probe tells most texts.

    Each bound of nothing is three standard deviations of chance, which may be exceeded: then more probes tell. What
    there is to tell goes under where the machine stands still too often: then it is asked again.
    """
    isolated = (measure(tiny_model, probes, is_isolated=True)["auc"] <= most for probes, most in NOTHING)
    assert any(isolated)
    assert any(measure(tiny_model, 60, is_isolated=False)["auc"] >= 0.75 for _ in range(TRIES))
