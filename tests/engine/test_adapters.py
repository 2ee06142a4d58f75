"""Each adapter's KV is its own, by what its files hold and not by what it is called."""

from pathlib import Path

import pytest

from hotspan.demo.model import make_demo_adapter

from .rig import CHUNK, rig

pytestmark = pytest.mark.engine


def test_adapters_do_not_share(tiny_model: Path, tmp_path: Path) -> None:
    """Base model, two adapters, and a third that takes over the first one's name and path: none finds another's KV."""
    from vllm.lora.request import LoRARequest

    for name, seed in (("a", 1), ("b", 2)):
        make_demo_adapter(tmp_path / name, tiny_model, seed=seed)
    first = LoRARequest("a", 1, str(tmp_path / "a"))
    second = LoRARequest("b", 2, str(tmp_path / "b"))
    with rig(tiny_model, enable_lora=True, max_loras=2, max_lora_rank=8) as engine:
        prompt = engine.text(1, 1500)
        whole = 1500 // CHUNK * CHUNK
        answers = {}
        for name, lora in (("base", None), ("a", first), ("b", second)):
            assert engine.ask(prompt, 8, lora=lora).cached == 0
            answers[name] = engine.ask(prompt, 8, lora=lora).tokens
            engine.settle()
        engine.forget_gpu()
        for name, lora in (("base", None), ("a", first), ("b", second)):
            hit = engine.ask(prompt, 8, lora=lora)
            assert (hit.cached, hit.tokens) == (whole, answers[name])
        engine.settle()

        make_demo_adapter(tmp_path / "new", tiny_model, seed=3)
        (tmp_path / "a" / "adapter_model.safetensors").write_bytes(
            (tmp_path / "new" / "adapter_model.safetensors").read_bytes()
        )
        engine.llm.llm_engine.remove_lora(1)
        engine.forget_gpu()
        changed = LoRARequest("a", 3, str(tmp_path / "a"))
        assert engine.ask(prompt, 8, lora=changed).cached == 0
        assert engine.digests.wrong == 0
        engine.cache.check()
