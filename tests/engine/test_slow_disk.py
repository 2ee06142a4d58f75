"""The small version of benchmarks/slow_disk.py: a sick disk under a real engine costs a computation, no request."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.beside_alone import CHUNK_GIB
from benchmarks.slow_disk import Sickness, fail, hang

from .rig import Rig, rig

pytestmark = pytest.mark.engine

TOKENS = 1200


def test_requests_over_a_sick_disk_are_answered_as_without_one(tiny_model: Path, tmp_path: Path) -> None:
    """Slow, failing and hung: every answer is right, and there before the disk is well; then it is used again."""
    sickness, released = Sickness(), threading.Event()
    kinds: list[Callable[[], None]] = [lambda: time.sleep(3), fail, lambda: hang(released)]
    with (
        sickness.installed(),
        rig(
            tiny_model,
            ram_gib=8 * CHUNK_GIB,
            disk=tmp_path / "kv",
            cache={"patience_s": None, "drain_s": 1.0},
        ) as engine,
    ):
        texts = [engine.text(n, TOKENS) for n in range(3)]
        expected = []
        for text in texts:
            expected.append(engine.ask(text).tokens)
            engine.settle()
        for before in kinds:
            released.clear()
            sickness.before = before
            for text, tokens in zip(texts, expected, strict=True):
                engine.evict_ram()
                engine.forget_gpu()
                assert engine.ask(text).tokens == tokens
            sickness.before = lambda: None
            released.set()
            assert came_back(engine, texts[0], 60), "the tier does not come back"
        assert engine.cache.cost is not None
        report = engine.cache.cost.report()
        assert report.prefill.count and report.loaded and report.late and report.tokens_per_s


def came_back(engine: Rig, text: list[int], within_s: float) -> bool:
    """Whether the text is found on disk again within that time, while requests go on."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        engine.ask(text)
        engine.evict_ram()
        engine.forget_gpu()
        if engine.ask(text).cached:
            return True
        time.sleep(0.2)
    return False
