"""Rates learnt from measurements: close after a few, steady under outliers, quick to follow a change, never wild."""

import math
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.cache.rates import Accuracy, Fit, Prefill

from .cost_rig import CPU, GPU, Engine, attended

ANY = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e3)


def teach(
    prefill: Prefill, engine: Engine, steps: int, rng: random.Random, noise: float, outliers: float = 0.0
) -> None:
    """Show it steps of texts of all lengths."""
    at = total = 0
    for _ in range(steps):
        if at >= total:
            at, total = 0, rng.choice([500, 3_000, 10_000, 32_000])
        tokens = min(engine.step_tokens, total - at)
        seconds = engine.step(at, tokens) * rng.lognormvariate(0, noise)
        if rng.random() < outliers:
            seconds *= rng.choice([3, 10, 50])
        prefill.observe_step(tokens, attended(at, tokens), seconds)
        at += tokens


def worst(prefill: Prefill, engine: Engine) -> float:
    """The largest relative error of what it predicts for short and long texts."""
    texts = [(0, 1_000), (0, 8_000), (0, 32_000), (16_000, 32_000)]
    return max(abs(float(prefill.seconds(*text)) / engine.prefill(*text) - 1) for text in texts)


def test_prefill_is_learnt_from_a_few_steps() -> None:
    """After 5 steps the time of any text is known to 15 %, after 50 to 6 %, on engines a thousand times apart."""
    for engine in (GPU, CPU, Engine(0.2, 0.02, 6e-7, step_tokens=512)):
        prefill = Prefill(engine.step_tokens)
        teach(prefill, engine, 5, random.Random(1), noise=0.03)
        assert worst(prefill, engine) < 0.15
        teach(prefill, engine, 45, random.Random(2), noise=0.03)
        assert worst(prefill, engine) < 0.06
        assert prefill.accuracy.error < 0.06


def test_prefill_stays_close_under_outliers() -> None:
    """One step in ten that takes 3 to 50 times as long moves the prediction by less than two fifths."""
    for engine in (GPU, CPU):
        prefill = Prefill(engine.step_tokens)
        teach(prefill, engine, 20, random.Random(1), noise=0.03)
        for seed in range(20):
            teach(prefill, engine, 10, random.Random(seed), noise=0.03, outliers=0.1)
            assert worst(prefill, engine) < 0.4


def test_prefill_forgets_a_compilation_at_once() -> None:
    """A first step that takes 100 times as long is forgotten with the second."""
    prefill = Prefill(2048)
    prefill.observe_step(2048, attended(0, 2048), 100 * GPU.step(0, 2048))
    prefill.observe_step(2048, attended(2048, 2048), GPU.step(2048, 2048))
    teach(prefill, GPU, 5, random.Random(1), noise=0.03)
    assert worst(prefill, GPU) < 0.3


def test_prefill_follows_an_engine_that_changes() -> None:
    """Ten steps after an engine became three times slower, or as fast as before, it is known to 20 %."""
    slower = Engine(GPU.step_s * 3, GPU.token_s * 3, GPU.pair_s * 3)
    prefill = Prefill(2048)
    teach(prefill, GPU, 100, random.Random(1), noise=0.03)
    for engine in (slower, GPU):
        teach(prefill, engine, 10, random.Random(2), noise=0.03)
        assert worst(prefill, engine) < 0.2


def test_what_is_far_from_the_evidence_is_less_certain() -> None:
    """Who has seen only short steps says so when asked about a long text, and not when asked about a short one."""
    prefill = Prefill(2048)
    for _ in range(20):
        prefill.observe_step(40, attended(1000, 40), GPU.step(1000, 40))
    assert prefill.factor(1000, 1040) < 1.5
    assert prefill.factor(0, 32_000) > 2


def test_a_single_slow_measurement_is_doubted() -> None:
    """One that is 100 times slower than the rest moves the prediction by less than a half; a second is believed."""
    fit = Fit((1.0, 1e-8), doubts=2)
    for _ in range(20):
        fit.observe((1.0, 1e7), 0.005)
    fit.observe((1.0, 1e7), 0.5)
    assert fit.predict((1.0, 1e7)) < 0.0075
    fit.observe((1.0, 1e7), 0.5)
    assert fit.predict((1.0, 1e7)) > 0.1


def test_a_fast_measurement_is_believed() -> None:
    """One that is 100 times faster is believed at once."""
    fit = Fit((1.0, 1e-8), doubts=2)
    for _ in range(20):
        fit.observe((1.0, 1e7), 0.5)
    fit.observe((1.0, 1e7), 0.005)
    assert fit.predict((1.0, 1e7)) < 0.02


def test_both_rates_are_found() -> None:
    """A latency and a bandwidth come out of transfers of two sizes, each within a fifth."""
    fit = Fit((1.0, 1 / (64 << 20)), doubts=2)
    for _ in range(30):
        for size in (1e6, 1e8):
            fit.observe((1.0, size), 0.02 + size / 1e9)
    latency_s, per_byte_s = fit.rates
    assert math.isclose(latency_s, 0.02, rel_tol=0.2)
    assert math.isclose(1 / per_byte_s, 1e9, rel_tol=0.2)


@settings(deadline=None)
@given(st.lists(st.tuples(ANY, ANY, ANY), max_size=60))
def test_no_measurement_makes_it_wild(measurements: list[tuple[float, float, float]]) -> None:
    """Rates, predictions and their uncertainty are finite and never negative, whatever is measured."""
    fit = Fit((1.0, 1e-8), doubts=2)
    for once, size, seconds in measurements:
        fit.observe((once, size), seconds)
        assert all(math.isfinite(rate) and rate >= 0 for rate in fit.rates)
        assert math.isfinite(fit.predict((1.0, 1e12)))
        assert 1 <= fit.factor_for((1.0, 1e12)) < 1e6


def test_accuracy_is_that_of_the_last_predictions() -> None:
    """Sums are over all, the error over the last few: it forgets a bad beginning."""
    accuracy = Accuracy().after(1.0, 10.0)
    assert math.isclose(accuracy.error, 0.9)
    for _ in range(100):
        accuracy = accuracy.after(1.0, 1.1)
    assert accuracy.count == 101
    assert math.isclose(accuracy.predicted_s, 101.0) and math.isclose(accuracy.actual_s, 120.0)
    assert math.isclose(accuracy.error, 0.1 / 1.1, rel_tol=0.05)
