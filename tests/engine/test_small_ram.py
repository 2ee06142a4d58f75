"""A RAM tier that holds one text and no more, with copies that end a step later than their request."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm.v1.kv_offload.base import TransferResult

from hotspan.core.types import GIB
from hotspan.engine.worker import HostWorker
from kit.engine import CHUNK
from tests.engine.harness.core import Core, core

pytestmark = pytest.mark.engine

SLOTS = 8
LATE = 1  # calls after which the scheduler hears of a copy


@pytest.fixture
def engine(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    """Its worker says of each copy that it has ended when it is asked the second time, however slow the machine is."""
    get_finished = HostWorker.get_finished
    later = deque[list[TransferResult]]([] for _ in range(LATE))

    def get_late(self: HostWorker) -> list[TransferResult]:
        self.wait(set(self._pending))
        later.append(get_finished(self))
        return later.popleft()

    monkeypatch.setattr(HostWorker, "get_finished", get_late)
    with core(tiny_model) as engine:
        slab = engine.cache.ram.slab
        ram_gib = (SLOTS + 0.01) * slab.bytes / slab.slots / GIB
    with core(tiny_model, ram_gib=ram_gib) as engine:
        assert engine.cache.ram.slab.slots == SLOTS
        yield engine
        engine.check()


@pytest.mark.parametrize("texts", [4, 5])  # were every second one left out, the last of these or of those would be
def test_each_text_is_stored(engine: Core, texts: int) -> None:
    """A text whose first chunk comes while the last one's end is being copied is stored like any other."""
    for seed in range(texts):
        engine.ask(engine.text(seed, SLOTS * CHUNK + 1))
    engine.forget_gpu()
    assert engine.ask(engine.text(texts - 1, SLOTS * CHUNK + 1)) == SLOTS * CHUNK
