"""What blending was not tested with is refused, each with its reason, before any forward."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from hotspan.engine.blend.selftest import CanNotBlend, self_test, unsupported


def runner(**fields: Any) -> Any:
    """An engine's runner as far as it is looked at first: two tensor-parallel workers, one group of full attention."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)
    config = {
        "model_config": {
            "is_multimodal_model": False,
            "is_encoder_decoder": False,
            "enable_prompt_embeds": False,
        },
        "parallel_config": {
            "world_size": 2,
            "tensor_parallel_size": 2,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
        },
        "cache_config": {"cache_dtype": "auto"},
    }
    for name, value in fields.items():
        config = {part: given | ({name: value} if name in given else {}) for part, given in config.items()}
    parts = {part: SimpleNamespace(**given) for part, given in config.items()}
    whole = {"lora_config": None, "speculative_config": None, "kv_events_config": None} | parts
    whole |= {name: value for name, value in fields.items() if name in whole}
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    return SimpleNamespace(vllm_config=SimpleNamespace(**whole), kv_cache_config=groups)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"world_size": 4}, "pipeline, data or context parallelism"),
        ({"data_parallel_size": 2}, "pipeline, data or context parallelism"),
        ({"decode_context_parallel_size": 2}, "pipeline, data or context parallelism"),
        ({"lora_config": object()}, "LoRA adapters"),
        ({"speculative_config": object()}, "speculative decoding"),
        ({"is_multimodal_model": True}, "a multimodal model"),
        ({"cache_dtype": "fp8"}, "a quantised KV cache"),
    ],
)
def test_what_was_not_tested_is_refused(fields: dict[str, Any], reason: str) -> None:
    """Two tensor-parallel workers are not; whatever else there is, is."""
    assert unsupported(runner().vllm_config, runner().kv_cache_config) is None
    with pytest.raises(CanNotBlend, match=reason):
        self_test(runner(**fields), 1 << 20, 256)
