"""The small version of benchmarks/timing.py."""

from pathlib import Path

import pytest
from benchmarks.timing import area_under_roc, measure

pytestmark = pytest.mark.engine


def test_the_area_is_that_of_every_pair() -> None:
    """The rank formula agrees with counting pairs."""
    hits, misses = [1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 4.0]
    pairs = [(hit, miss) for hit in hits for miss in misses]
    counted = sum((hit < miss) + (hit == miss) / 2 for hit, miss in pairs) / len(pairs)
    assert area_under_roc(hits, misses) == pytest.approx(counted)
    assert area_under_roc([1.0], [2.0]) == 1.0


def test_another_tenants_texts_can_not_be_told_from_new_ones(tiny_model: Path) -> None:
    """With isolation a probe's time says nothing (of 200 probes; three standard deviations of chance are 0.12); with
    sharing the same probe tells most texts."""
    assert measure(tiny_model, 200, is_isolated=True)["auc"] <= 0.62
    assert measure(tiny_model, 60, is_isolated=False)["auc"] >= 0.75
