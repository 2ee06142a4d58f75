"""What an engine core tells of its progress, by a real scheduler."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore

from hotspan.engine import plugin
from hotspan.engine.progress import UTILITY, offer_progress

from .harness.core import core


def test_it_changes_with_each_token_and_stays_without(tiny_model: Path) -> None:
    """None while idle; another number after each step that computes; the same after steps that schedule nothing."""
    plugin.register()
    with core(tiny_model) as engine:
        told: Any = lambda: getattr(engine.core, UTILITY)()  # noqa: E731
        assert told() is None
        engine.start("one", engine.text(0, 700), 20)
        assert isinstance(told(), int)
        seen = {told()}
        for steps in range(1, 5):
            engine.step(1)
            seen.add(told())
            assert len(seen) == 1 + steps
        scheduler = engine.core.scheduler
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(scheduler, "max_num_scheduled_tokens", 0)  # a fault: it schedules nothing, for ever
            before = told()
            for n in range(5):
                engine.start(f"comes-{n}", engine.text(n, 20))
                engine.step(1)
                assert told() == before, "a request that came was taken for progress"
                engine.core.abort_requests([f"comes-{n - 1}"])
                engine.step(1)
                assert told() == before, "a request that was given up was taken for progress"
        engine.step(1)
        assert told() != before
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert told() is None
        scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.finish()
        assert told() is None


def test_a_process_without_a_core_offers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM calls plugins in all of its processes: none imports an engine core for that."""
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", None)
    offer_progress()
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.core", SimpleNamespace(EngineCore=EngineCore))
    offer_progress()
    assert callable(getattr(EngineCore, UTILITY))
