"""Which families of models an engine can blend: their keys are where a prefill has them; the others serve as ever."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hotspan.engine.blend.runs import Run
from kit.engine import Rig, rig
from kit.families.make import make_family
from kit.families.table import FAMILIES, Family

from .engine import PACE, Library, ask, forward, of, settings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLENDED = {"Llama", "Qwen2", "Qwen3", "Qwen3-MoE", "Mistral", "Ministral 3"}
OPTIONS = {"max_model_len": 2304, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 26}


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_a_familys_keys_are_moved_or_it_does_not_blend(family: Family, tiny_model: Path, tmp_path: Path) -> None:
    """The first layer of reused text, which depends on tokens and positions alone, is that of a prefill."""
    model = make_family(family, tmp_path / "model", tiny_model)
    options = {"dtype": family.dtype, **OPTIONS, **family.engine}
    with rig(model, cache={"blend": settings()}, ram_gib=0.3, **options) as engine:
        engine.ask(engine.text(999, 40), 2)
        assert (of(engine).off is None) == (family.name in BLENDED)
        of(engine).pace = PACE
        library = Library(engine, 1, 3)
        library.learn()
        prompt = library.prompt(2, 1, 0)
        if of(engine).off is None:
            check_first_layer(engine, prompt)
        else:
            assert ask(engine, prompt)[0].blend is None


def check_first_layer(engine: Rig, prompt: list[int]) -> None:
    """Blend a prompt, and compare with a prefill of it."""
    engine.forget_gpu()
    engine.start("blended", prompt, 4)
    while not engine.scheduler.running:
        engine.step()
    claimed = Run(0, len(prompt) - 1)
    own = forward().blocks_of(next(iter(forward()._runner.requests)))
    free = [block for block in range(1, forward()._runner.kv_cache_config.num_blocks) if block not in own][: len(own)]
    forward().compute(np.array(prompt, np.uint32), free, [claimed])
    found, expected = (forward().read(blocks, claimed, 0).float() for blocks in (own, free))
    limit = 2e-3 if forward().dtype == torch.float32 else 5e-2
    assert float((found - expected).abs().max()) < limit
    assert not torch.equal(forward().read(own, claimed, 1), forward().read(free, claimed, 1))  # it was blended
    while engine.llm.llm_engine.has_unfinished_requests():
        engine.step()
