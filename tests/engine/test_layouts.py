"""Other KV layouts than one group of full attention: sliding windows beside it, and latent attention (MLA)."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from .rig import CHUNK, rig

pytestmark = pytest.mark.engine

SHARED = {"vocab_size": 768, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
SHARED |= {"max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "bos_token_id": 1, "eos_token_id": 0}

GEMMA3 = SHARED | {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "sliding_window": 512,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "query_pre_attn_scalar": 64,
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1e6,
    "hidden_activation": "gelu_pytorch_tanh",
}
DEEPSEEK2 = SHARED | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "num_hidden_layers": 4,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 4,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def make_model(directory: Path, config: dict[str, Any], tiny: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, directory)
    return directory


@pytest.mark.parametrize(("name", "config"), [("gemma3", GEMMA3), ("deepseek2", DEEPSEEK2)])
def test_layout_comes_back(name: str, config: dict[str, Any], tiny_model: Path, tmp_path: Path) -> None:
    """RAM and disk hits are byte-identical, and give the tokens of the engine's own prefix-cache hit."""
    model = make_model(tmp_path / name, config, tiny_model)
    dtype = "bfloat16"  # the CPU backend has MLA in bfloat16 only
    options = {"load_format": "dummy", "dtype": dtype, "num_gpu_blocks_override": None}
    options |= {"kv_cache_memory_bytes": 1 << 27}
    with rig(model, ram_gib=0.02, disk=tmp_path / "kv", **options) as engine:
        prompt = engine.text(1, 2900)
        engine.ask(prompt, 12)
        own = engine.ask(prompt, 12)
        engine.settle()
        engine.forget_gpu()
        hit = engine.ask(prompt, 12)
        assert hit.cached >= 2900 // CHUNK * CHUNK - CHUNK
        assert hit.tokens == own.tokens
        loaded = engine.digests.loaded
        engine.evict_ram()
        engine.forget_gpu()
        hit = engine.ask(prompt, 12)
        assert hit.cached >= 2900 // CHUNK * CHUNK - CHUNK
        assert hit.tokens == own.tokens
        assert engine.digests.loaded > loaded
        assert engine.digests.wrong == 0
        engine.cache.check()
