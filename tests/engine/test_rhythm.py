"""Next turns of sessions, prefetched by their rhythm: vLLM's real scheduler without a model, and a simulated clock."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hotspan.cache.rhythm import LEAST, OWN_GAPS, TENANT_GAPS
from hotspan.core.types import Tier
from hotspan.testing.clock import SimulatedClock

from .harness.core import CHUNK, Core, IdleCore, core

pytestmark = pytest.mark.usefixtures("books_agree")

LENGTH, GAP_S = 900, 20.0
WHOLE = LENGTH // CHUNK * CHUNK


@pytest.fixture(scope="module")
def clock() -> SimulatedClock:
    return SimulatedClock()


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory, clock: SimulatedClock) -> Iterator[Core]:
    disk = tmp_path_factory.mktemp("rhythm") / "kv"
    with core(tiny_model, disk=disk, cache={"prefetch_sessions": True}, clock=clock) as engine:
        yield engine


def take_turns(engine: Core, clock: SimulatedClock, prompt: list[int], session: str, times: int) -> None:
    """Turns of a session, each as long after the last as before; the text is on disk only, then."""
    for _ in range(times):
        clock.advance(GAP_S)
        engine.stored(prompt, session=session)
    engine.forget_gpu()
    engine.evict_ram()


def test_a_regular_sessions_text_is_in_ram_before_its_turn(
    engine: Core, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shortly before, not earlier; the turn reads nothing from disk, and counts as used."""
    prompt = engine.text(1, LENGTH)
    take_turns(engine, clock, prompt, "regular", OWN_GAPS + 1)
    notes: list[Any] = []
    monkeypatch.setattr(engine.manager.rhythm, "note", lambda source, *chunks: notes.append((source.is_own, *chunks)))
    clock.advance(GAP_S / 2)
    engine.administrator.run_waiting()
    assert not engine.cache.ram.entries
    clock.advance(GAP_S / 2 - 1.0)
    engine.administrator.run_waiting()
    engine.until(lambda: not engine.cache.prefetches.is_moving, engine.administrator.run_waiting)
    disk, loads = engine.cache._lower.tiers[0].storage, list[Any]()
    with monkeypatch.context() as patched:
        patched.setattr(disk, "submit_load", lambda *load: loads.append(load))
        assert engine.ask(prompt, session="regular") == WHOLE and not loads
    engine.administrator.run_waiting()
    assert notes == [(True, WHOLE // CHUNK, 0)] and engine.cache.prefetches.ends_s is None


def test_an_idle_engine_announces_what_is_due(engine: Core, clock: SimulatedClock) -> None:
    """While it sleeps on its queue, a thread has its core begin; what no turn came for goes when its time is over."""
    take_turns(engine, clock, engine.text(2, LENGTH), "idle", OWN_GAPS + 1)
    with IdleCore(engine):
        clock.advance(GAP_S - 1.0)
        engine.administrator._announcer._wake()
        engine.until(lambda: engine.cache.usage()[Tier.RAM].chunks == LENGTH // CHUNK, lambda: None)
        engine.until(lambda: not engine.cache.prefetches.is_moving, lambda: None)  # for a disk, 20 s are a hang
        clock.advance(GAP_S)
        engine.administrator._announcer._wake()
        engine.until(lambda: not engine.cache.usage()[Tier.RAM].chunks, lambda: None)


def test_a_text_that_is_in_ram_is_not_announced(engine: Core, clock: SimulatedClock) -> None:
    """Nothing is held for a session whose text has not left RAM."""
    prompt = engine.text(3, LENGTH)
    take_turns(engine, clock, prompt, "in-ram", OWN_GAPS)
    clock.advance(GAP_S)
    engine.stored(prompt, session="in-ram")
    clock.advance(GAP_S - 1.0)
    engine.administrator.run_waiting()
    assert engine.cache.prefetches.ends_s is None


def test_sessions_that_do_not_go_on_are_no_longer_announced(engine: Core, clock: SimulatedClock) -> None:
    """A tenant's gaps predict turns of new sessions; these never come, and after ten of them none is announced."""
    pool = engine.stored(engine.text(4, LENGTH))
    for number in range(TENANT_GAPS):
        for _ in range(2):
            clock.advance(GAP_S)
            engine.stored(pool, session=f"pool-{number}")
    clock.advance(10 * GAP_S)
    engine.administrator.run_waiting()
    started = []
    for number in range(LEAST + 2):
        take_turns(engine, clock, engine.text(100 + number, LENGTH), f"once-{number}", 1)
        clock.advance(GAP_S - 1.0)
        engine.administrator.run_waiting()
        started.append(engine.cache.prefetches.ends_s is not None)
        engine.until(lambda: not engine.cache.prefetches.is_moving, engine.administrator.run_waiting)
        clock.advance(GAP_S)
        engine.administrator.run_waiting()
    assert started == [True] * LEAST + [False] * 2
