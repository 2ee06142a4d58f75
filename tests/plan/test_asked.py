"""A plan rests on what vLLM itself counts of a model, where vLLM is installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import ConfigError
from hotspan.engine.model_values import engine_values
from hotspan.plan.asked import check_shape
from tests.plan.known import KNOWN

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
}
FALCON = {
    "model_type": "falcon",
    "architectures": ["FalconForCausalLM"],
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "hidden_size": 4544,
    "multi_query": True,
    "torch_dtype": "bfloat16",
}
LATENT = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
}


def written(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("config", "values"), [(LLAMA, 2 * 8 * 128), (FALCON, 2 * 64), (LATENT, 512 + 64)], ids=["llama", "falcon", "mla"]
)
def test_vllm_is_asked(tmp_path: Path, config: dict[str, Any], values: int) -> None:
    """vLLM counts the heads that its classes have, and hotspan agrees."""
    assert engine_values(written(tmp_path, config)) == values
    assert check_shape(tmp_path, engine_values).value == "the same"


def test_a_model_that_is_read_otherwise_is_refused(tmp_path: Path) -> None:
    """Figures that the engine would not keep are no plan: the error names both."""
    with pytest.raises(ConfigError, match=r"vLLM keeps 128 values .* hotspan reads 2,048"):
        check_shape(written(tmp_path, LLAMA), lambda directory: 128)


def test_without_vllm_nothing_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the engine plans from the configuration alone."""
    monkeypatch.setitem(sys.modules, "vllm.transformers_utils.config", None)
    assert check_shape(written(tmp_path, LLAMA), engine_values).value == "not asked"


NOT_ASKED = {
    "StarCoder": "its class sets one KV head itself",
    "SantaCoder": "the same",
    "InternLM2-7B": "its configuration is code of its repository",
}


@pytest.mark.parametrize("name", KNOWN)
def test_no_published_model_is_refused(tmp_path: Path, name: str) -> None:
    """What vLLM counts of a model of the table is what was counted by hand."""
    value = check_shape(written(tmp_path, dict(KNOWN[name].config)), engine_values).value
    assert value == ("not asked" if name in NOT_ASKED else "the same")
