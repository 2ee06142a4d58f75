"""Two ranks over one slab."""

import os
from pathlib import Path
from typing import Any

import pytest

from hotspan.tiers.slab import sweep_dead_slabs
from kit.engine import CHUNK, rig
from kit.families.make import make_family
from kit.families.table import FAMILIES

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]


def test_tensor_parallel_hits(tiny_model: Path, tmp_path: Path) -> None:
    """With TP=2, in a process per rank, RAM and disk hits give the tokens of the engine's own prefix-cache hit."""
    check_hits(tiny_model, tmp_path)


@pytest.mark.slow
def test_tensor_parallel_hits_of_latents(tiny_model: Path, tmp_path: Path) -> None:
    """With MLA each rank holds the whole KV, not a part of it, and each gets it back."""
    (family,) = [family for family in FAMILIES if family.name == "DeepSeek-V2"]
    model = make_family(family, tmp_path / "model", tiny_model)
    check_hits(
        model,
        tmp_path,
        dtype=family.dtype,
        block_size=None,
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=1 << 26,
    )


def check_hits(model: Path, tmp_path: Path, **options: Any) -> None:
    """RAM and disk hits cover all whole chunks and change no token."""
    sweep_dead_slabs()
    with rig(model, disk=tmp_path / "kv", tensor_parallel_size=2, **options) as engine:
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
