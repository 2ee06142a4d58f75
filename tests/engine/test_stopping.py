"""An engine that is stopped right after an answer gives the answer's chunks to the tiers below RAM, and ends in time.

vLLM's own loop ends it, over the scheduler, cache and tiers in simulated time.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from hotspan.core.types import Tier
from hotspan.engine.opening import _drain_s
from kit.engine import HANG_S
from kit.simulated.memory_store import MemoryServer

from .harness.core import CHUNK, Core, core
from .harness.simulated import simulated

TOKENS = 2000
CHUNKS = TOKENS // CHUNK
DRAIN_S = 10.0


def answer(engine: Core) -> list[int]:
    """A text, at the moment of its answer."""
    text = engine.text(1, TOKENS)
    engine.start("a", text)
    while "a" not in engine.step():
        pass
    return text


def stop(engine: Core, each: Callable[[], object] = lambda: None) -> None:
    """What vLLM does in an engine's process on SIGTERM. each: called after each step that it takes until it ends."""
    loop = EngineCoreProc.__new__(EngineCoreProc)
    loop.__dict__.update(engine.core.__dict__)
    loop.step_fn = loop.step
    loop.input_queue, loop.output_queue = queue.Queue(), queue.Queue()
    loop.engines_running = False
    loop.shutdown_state = EngineShutdownState.REQUESTED
    while loop._handle_shutdown():
        loop._process_engine_step()
        each()
    engine.core.model_executor.shutdown()
    engine.scheduler.shutdown()


@pytest.mark.parametrize("slow", ["disk", "l2"])
def test_what_an_answer_left_is_in_the_slower_tier(tiny_model: Path, tmp_path: Path, slow: str) -> None:
    """Stopped right after the answer: the tier did not have all of its chunks then, and has them after the end."""
    server = MemoryServer() if slow == "l2" else None
    disk = tmp_path / "kv" if slow == "disk" else None
    with simulated(tiny_model, disk=disk, l2=server, cache={"drain_s": DRAIN_S}) as engine:
        engine.medium.slow(0.5)
        text = answer(engine)
        assert engine.cache.usage()[engine.tiers[0].tier].chunks < CHUNKS
        stop(engine)
    with simulated(tiny_model, disk=disk, l2=server) as engine:
        assert engine.ask(text) == CHUNKS * CHUNK


def test_a_tier_that_hangs_is_given_up_in_time(
    tiny_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other tier has all chunks, the end comes within its bound, and the log has how many the L2 did not get."""
    server = MemoryServer()
    with simulated(tiny_model, disk=tmp_path / "kv", l2=server, cache={"drain_s": DRAIN_S}) as engine:
        engine.l2.hang()
        answer(engine)
        began_s = engine.clock.monotonic()
        stop(engine)
        assert engine.clock.monotonic() - began_s <= DRAIN_S + 0.1  # steps before the end, 1 ms each
        assert f"stores_given_up tier=l2 chunks={CHUNKS} " in caplog.text and "tier=disk" not in caplog.text
        assert engine.cache.usage()[Tier.DISK].chunks == CHUNKS and not server.objects


def test_copies_that_have_begun_end_first(tiny_model: Path, tmp_path: Path) -> None:
    """While the copies of an answer's chunks into RAM go on, the engine does; then they reach the disk."""
    steps, released = itertools.count(), threading.Event()
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        worker = engine.runner.connector.connector_worker.worker
        transfer = worker._transfer
        worker._transfer = lambda *copy: released.wait(HANG_S) and transfer(*copy)
        text = answer(engine)
        try:
            stop(engine, lambda: next(steps) == 5 and released.set())
        finally:
            was_released = released.is_set()
            released.set()
        assert was_released, "it ended before its copies had"
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(text) == CHUNKS * CHUNK


def test_an_engine_without_a_process_of_its_own_stores_what_is_left(tiny_model: Path, tmp_path: Path) -> None:
    """It is never stepped after the last answer: its end stores what vLLM would have stored in the next step."""
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        text = answer(engine)
        engine.start("b", engine.text(2, TOKENS))  # nobody waits for it any more
    with core(tiny_model, disk=tmp_path / "kv") as engine:
        assert engine.ask(text) == CHUNKS * CHUNK


def test_the_end_of_a_forked_child_leaves_its_parent_s_engine_alone(tiny_model: Path, tmp_path: Path) -> None:
    """Python's finalizers end the engine in a child of os.fork() too, whose copy of it has no threads and old books."""
    with core(tiny_model, disk=tmp_path / "disk") as engine:
        engine.stored(engine.text(1, TOKENS))
        child = os.fork()
        if not child:
            engine.core.step_fn = engine.cache.close = lambda *_: os._exit(3)  # type: ignore[method-assign]
            with contextlib.suppress(BaseException):
                engine.core.shutdown()
                os._exit(0)
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        engine.stored(engine.text(2, TOKENS))
    with core(tiny_model, disk=tmp_path / "disk") as engine:
        assert [engine.ask(engine.text(n, TOKENS)) for n in (1, 2)] == [CHUNKS * CHUNK] * 2
        engine.check()


@pytest.mark.parametrize(("grace_s", "most_s"), [(0, 10), (1, 1), (5, 5), (12, 10), (30, 10), (300, 10)])
def test_it_writes_no_longer_than_the_engine_may_live(grace_s: float, most_s: float) -> None:
    """vLLM kills an engine at the end of --shutdown-timeout: the tiers end before that, or as ever without one."""
    assert 0 < _drain_s(DRAIN_S, grace_s) <= most_s
    assert not grace_s or _drain_s(DRAIN_S, grace_s) < grace_s
