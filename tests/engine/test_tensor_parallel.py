"""Two ranks over one slab."""

import os
from pathlib import Path

import pytest

from hotspan.tiers.slab import sweep_dead_slabs

from .rig import CHUNK, rig

pytestmark = pytest.mark.engine


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores")
def test_tensor_parallel_hits(tiny_model: Path, tmp_path: Path) -> None:
    """With TP=2, in a process per rank, RAM and disk hits give the tokens of the engine's own prefix-cache hit."""
    sweep_dead_slabs()
    with rig(tiny_model, disk=tmp_path / "kv", tensor_parallel_size=2) as engine:
        prompt = engine.text(1, 2900)
        engine.ask(prompt, 12)
        own = engine.ask(prompt, 12)
        engine.settle()
        engine.forget_gpu()
        ram = engine.ask(prompt, 12)
        engine.evict_ram()
        engine.forget_gpu()
        disk = engine.ask(prompt, 12)
        assert own.cached >= ram.cached == disk.cached == 2900 // CHUNK * CHUNK
        assert own.tokens == ram.tokens == disk.tokens
        engine.cache.check()
    assert sweep_dead_slabs() == 0, "a slab kept its name"
