"""Loads that a step waits for: a request that has its text in RAM is computed in the step that it begins with."""

from pathlib import Path

import pytest

from kit.engine import CHUNK
from tests.engine.harness.core import Core, core

pytestmark = pytest.mark.engine


def kept(engine: Core, seed: int, chunks: int = 3) -> list[int]:
    """A text whose chunks lie in RAM and on disk, and not in the engine's own cache."""
    text = engine.stored(engine.text(seed, chunks * CHUNK + 10))
    engine.forget_gpu()
    return text


def test_a_hit_in_ram_needs_one_step(tiny_model: Path) -> None:
    """The first token of a request that loads from RAM comes with the step in which it was looked up."""
    with core(tiny_model) as engine:
        text = kept(engine, 1)
        engine.start("a", text)
        assert engine.step() == {"a": 3 * CHUNK}
        engine.check()


def test_requests_that_share_a_text_load_it_once(tiny_model: Path) -> None:
    """Two requests of one step read the blocks that the first one loads."""
    with core(tiny_model) as engine:
        text = kept(engine, 1)
        before = engine.runner.read
        engine.start("a", text)
        engine.start("b", [*text, *engine.text(9, 5)])
        assert engine.step() == {"a": 3 * CHUNK, "b": 3 * CHUNK}
        assert engine.runner.read > before
        engine.check()


def test_a_prompt_of_whole_chunks_is_loaded_beside_the_step(tiny_model: Path) -> None:
    """Where all tokens of a prompt are in RAM, the last one is computed, and nothing wrong is read."""
    with core(tiny_model) as engine:
        text = engine.stored(engine.text(1, 3 * CHUNK))
        engine.forget_gpu()
        assert engine.ask(text) >= 3 * CHUNK - 1
        engine.check()


def test_a_long_copy_is_made_beside_a_step_of_others(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of other requests does not wait for a copy that is long beside it: the request begins in a later one."""
    with core(tiny_model, disk=None) as engine:
        text = kept(engine, 1)
        monkeypatch.setattr(engine.manager, "may_stall", lambda tokens: False)
        engine.start("a", text)
        assert engine.step() == {}
        assert engine.finish() == {"a": 3 * CHUNK}
        engine.check()


def test_a_reset_in_between_waits_for_the_copy(tiny_model: Path) -> None:
    """A reset of the cache behind a step with such a load leaves the books right, and the next request right bytes."""
    with core(tiny_model) as engine:
        text = kept(engine, 1)
        engine.start("a", text, 4)
        engine.step()
        engine.connector.reset_cache()
        engine.finish()
        engine.settle()
        assert engine.ask(engine.text(2, 2 * CHUNK)) == 0
        engine.check()


def test_slots_are_given_back(tiny_model: Path) -> None:
    """After such loads no chunk in RAM is pinned, and no job is left."""
    with core(tiny_model) as engine:
        texts = [kept(engine, seed) for seed in range(3)]
        for number, text in enumerate(texts):
            engine.start(str(number), text)
        engine.finish()
        engine.settle()
        assert not engine.cache.ram.is_pinned
        assert not engine.connector._inline._loads
        engine.check()


def test_an_aborted_request_keeps_its_slots_until_the_copy_is_reported(tiny_model: Path) -> None:
    """Chunks that a step is copying stay pinned, however their request ends before the step's output is there."""
    with core(tiny_model) as engine:
        text = kept(engine, 1)
        engine.start("a", text, 4)
        scheduled = engine.scheduler.schedule()
        assert scheduled.has_sync_kv_loads
        engine.core.abort_requests(["a"])
        assert engine.cache.ram.is_pinned
        engine.scheduler.update_from_output(scheduled, engine.runner.execute_model(scheduled))
        engine.settle()
        assert not engine.cache.ram.is_pinned
        engine.check()


def beside_another(engine: Core, mean_s: float) -> dict[str, int]:
    """What ends with the step in which a request comes whose chunks lie on disk, while another one decodes.

    mean_s: what the engine's steps are taken to last.
    """
    text = kept(engine, 1)
    engine.evict_ram()
    engine.start("runs", engine.text(2, 40), 20)
    engine.step()
    cost, steps = engine.cache.cost, engine.manager.steps
    assert cost is not None and steps is not None
    for _ in range(8):  # an engine that computes a token a second: what can be loaded is
        cost.observe_step(100, 0, 100.0)
    steps._mean_s, steps._last_s = mean_s, 0.0
    engine.start("a", text)
    return engine.step()


def test_a_step_waits_for_chunks_that_come_soon(tiny_model: Path, tmp_path: Path) -> None:
    """A request whose chunks lie on disk begins with the step in which it was looked up, if that step is long."""
    with core(tiny_model, disk=tmp_path / "kv", cache={"patience_s": None}) as engine:
        assert beside_another(engine, 6000.0) == {"a": 3 * CHUNK}
        engine.finish()
        engine.check()


def test_a_step_does_not_wait_for_chunks_that_come_late(tiny_model: Path, tmp_path: Path) -> None:
    """Beside short steps a request waits for its chunks, and the step does not."""
    with core(tiny_model, disk=tmp_path / "kv", cache={"patience_s": None}) as engine:
        assert beside_another(engine, 0.0) == {}
        assert engine.finish()["a"] == 3 * CHUNK
        engine.check()
