"""The layout of latent attention (MLA), in a short test; `families/` has the whole one, and those of other families."""

from pathlib import Path

import pytest

from kit.engine import CHUNK, rig
from kit.families.make import make_family
from kit.families.table import FAMILIES

pytestmark = pytest.mark.engine


def test_latents_come_back(tiny_model: Path, tmp_path: Path) -> None:
    """RAM and disk hits are byte-identical, and give the tokens of the engine's own prefix-cache hit."""
    (family,) = (each for each in FAMILIES if each.name == "DeepSeek-V2")
    model = make_family(family, tmp_path / "model", tiny_model)
    options = {"dtype": family.dtype, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 26}
    with rig(model, ram_gib=0.02, disk=tmp_path / "kv", **options) as engine:
        prompt = engine.text(1, 2900)
        engine.ask(prompt, 12)
        own = engine.ask(prompt, 12)
        engine.settle()
        for is_in_ram in (True, False):
            loaded = engine.digests.loaded
            if not is_in_ram:
                engine.evict_ram()
            engine.forget_gpu()
            hit = engine.ask(prompt, 12)
            assert hit.cached >= 2900 // CHUNK * CHUNK - CHUNK
            assert hit.tokens == own.tokens
            assert engine.digests.loaded > loaded
        assert engine.digests.wrong == 0
        engine.cache.check()
