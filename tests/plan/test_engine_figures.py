"""The shape's figures against the engine's own formulas, which run here without an engine."""

import pytest
import torch
from vllm.config import CacheConfig
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.core.kv_cache_utils import _get_kv_cache_groups_uniform_page_size
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from hotspan.plan.machines import GPU_MEMORY_UTILIZATION
from hotspan.plan.shape import LayerKind, ModelShape

from . import models
from .models import Config

BLOCK = 16


def spec(shape: ModelShape, config: Config, kind: LayerKind, window: int | None) -> KVCacheSpec:
    """What vLLM makes of one layer, on one rank (model_executor/layers/attention)."""
    text = config.get("text_config", config)
    kv_heads = max(1, text["num_key_value_heads"] // shape.tensor_parallel)
    size = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    dtype = torch.uint8 if shape.kv_dtype.startswith("fp8") else torch.bfloat16
    if kind is LayerKind.LATENT:
        latent = text["kv_lora_rank"] + text["qk_rope_head_dim"]
        return MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=latent, dtype=dtype)
    if kind is LayerKind.WINDOW:
        assert window is not None
        return SlidingWindowSpec(
            block_size=BLOCK, num_kv_heads=kv_heads, head_size=size, dtype=dtype, sliding_window=window
        )
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=kv_heads, head_size=size, dtype=dtype)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", ["QWEN_7B", "LLAMA_70B", "DEEPSEEK_V3", "GPT_OSS_20B", "GEMMA3_27B", "MISTRAL_7B"])
def test_pages_are_the_engines(name: str, kv_dtype: str, ranks: int) -> None:
    """All layers' pages of all ranks are as many bytes as the shape says, block for block."""
    config = getattr(models, name)
    shape = ModelShape.from_config(config, kv_dtype=kv_dtype, tensor_parallel=ranks)
    pages = sum(
        layers.count * spec(shape, config, layers.kind, layers.window).page_size_bytes for layers in shape.layers
    )
    assert shape.kv_bytes_per_token * BLOCK == ranks * pages


@pytest.mark.parametrize(("full", "windows"), [(12, 12), (10, 52), (13, 12), (10, 15), (10, 14), (1, 5)])
def test_groups_waste_as_the_engines_do(full: int, windows: int) -> None:
    """With layers of two kinds, equal slots for the engine's groups take what the shape says."""
    kinds = ["full_attention"] * full + ["sliding_attention"] * windows
    config = models.GPT_OSS_20B | {"num_hidden_layers": full + windows, "layer_types": kinds}
    shape = ModelShape.from_config(config)
    specs = {
        f"{layers.kind.value}.{index}": spec(shape, config, layers.kind, layers.window)
        for layers in shape.layers
        for index in range(layers.count)
    }
    groups = _get_kv_cache_groups_uniform_page_size(specs)
    slot = max(len(group.layer_names) for group in groups) * groups[0].kv_cache_spec.page_size_bytes
    assert shape.tier_bytes_per_token * BLOCK == len(groups) * slot


def test_states_are_the_engines() -> None:
    """The fixed state of gated delta nets and of Mamba 2 has the bytes of vLLM's tensors."""
    dtypes = (torch.bfloat16, torch.bfloat16)
    delta = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 16, 32, 128, 128, 4)
    mamba = MambaStateShapeCalculator.mamba2_state_shape(1, 128 * 64, 1, 128, 64, 128, 4)
    for config, shapes in ((models.QWEN3_NEXT, delta), (models.GRANITE_4, mamba)):
        page = MambaSpec(block_size=BLOCK, shapes=shapes, dtypes=dtypes).page_size_bytes
        (states,) = (each for each in ModelShape.from_config(config).layers if each.kind is LayerKind.STATE)
        assert states.state_bytes == page


def test_the_share_of_a_gpus_memory_is_the_engines_default() -> None:
    """`hotspan plan --machine` sizes the pool by what vLLM takes if nobody says otherwise."""
    assert CacheConfig().gpu_memory_utilization == GPU_MEMORY_UTILIZATION
