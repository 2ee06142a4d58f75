"""Requests whose text comes in parts while they run, as on /v1/realtime: nothing of them is stored or loaded.

vLLM schedules such a request anew with each part, and its connector then takes other blocks for those of the text.
"""

from pathlib import Path

import pytest

from .harness.core import Core, core

FIRST, SECOND = 600, 900


def spoken(engine: Core, name: str, seed: int, *, is_late: bool) -> list[int]:
    """The text of a request that comes in two parts, and has ended; a late second one comes when the first is done."""
    first, second = engine.text(seed, FIRST), engine.text(seed + 1, SECOND)
    request = engine.start(name, first, 2, resumable=True)
    if is_late:
        engine.step(8)
    engine.start(name, second, 2, resumable=True)
    engine.step(8)
    text = list(request.all_token_ids)
    engine.start(name, [0], 1)  # the last part ends it
    engine.step(6)
    return text


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("is_served", [False, True])
def test_a_text_that_comes_in_parts_is_not_stored(
    tiny_model: Path, tmp_path: Path, is_served: bool, is_late: bool
) -> None:
    with core(tiny_model, disk=tmp_path / "disk", cache={"is_served": is_served}) as engine:
        for n in range(3):
            text = spoken(engine, f"session-{n}", 10 * n + 1, is_late=is_late)
            engine.forget_gpu()
            assert engine.ask(text) == 0
        engine.settle()
        engine.check()


def test_a_text_that_comes_in_parts_takes_nothing_from_the_tiers(tiny_model: Path) -> None:
    with core(tiny_model) as engine:
        known = engine.stored(engine.text(1, FIRST))
        engine.forget_gpu()
        engine.start("session", known, 2, resumable=True)
        engine.step(8)
        assert engine.cached["session"] == 0
        engine.start("session", [0], 1)
        engine.step(6)
        engine.settle()
        engine.check()
