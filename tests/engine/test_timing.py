"""What a tenant can tell by the time to first token of another tenant's texts: nothing, in simulated time.

How well a classifier does on a real engine is measured by benchmarks/timing.py (`make timing`).
"""

from pathlib import Path

import pytest

from benchmarks.timing import area_under_roc
from hotspan.core.directives import Directives
from hotspan.engine.guard import RequestGuard

from .harness.simulated import SimulatedCore, simulated

LENGTH = 1000


def took_s(engine: SimulatedCore, tenant: str, prompt: list[int], *, is_isolated: bool) -> float:
    """Seconds to the first token of a tenant's request, as its server sends it to the engine."""
    guard = RequestGuard(lambda: tenant, is_isolated=is_isolated)
    began_s = engine.clock.monotonic()
    engine.ask(prompt, salt=guard.salt(tenant, None), hotspan=Directives(tenant=tenant).to_json())
    seconds = engine.clock.monotonic() - began_s
    engine.settle()
    return seconds


@pytest.mark.parametrize("is_isolated", [True, False])
@pytest.mark.parametrize("is_in", ["engine", "ram", "disk"])
def test_another_tenants_texts_take_as_long_as_new_ones(
    tiny_model: Path, tmp_path: Path, is_isolated: bool, is_in: str
) -> None:
    """Wherever the other tenant's text is; where tenants share, it is faster."""
    with simulated(tiny_model, disk=tmp_path / "kv", cache={"is_isolated": is_isolated}) as engine:
        for seed in range(4):  # the cost model knows the engine then
            took_s(engine, "a", engine.text(seed, LENGTH), is_isolated=is_isolated)
        text = engine.text(10, LENGTH)
        took_s(engine, "a", text, is_isolated=is_isolated)
        if is_in == "disk":
            engine.evict_ram()
        if is_in != "engine":
            engine.forget_gpu()
        known_s = took_s(engine, "b", text, is_isolated=is_isolated)
        new_s = took_s(engine, "b", engine.text(11, LENGTH), is_isolated=is_isolated)
        assert known_s == pytest.approx(new_s, rel=1e-9) if is_isolated else known_s < 0.5 * new_s


def test_the_area_is_that_of_every_pair() -> None:
    """The benchmark's rank formula agrees with counting pairs."""
    hits, misses = [1.0, 2.0, 2.0, 5.0], [2.0, 3.0, 4.0]
    pairs = [(hit, miss) for hit in hits for miss in misses]
    counted = sum((hit < miss) + (hit == miss) / 2 for hit, miss in pairs) / len(pairs)
    assert area_under_roc(hits, misses) == pytest.approx(counted)
    assert area_under_roc([1.0], [2.0]) == 1.0
