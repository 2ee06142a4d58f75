"""Published models are sized as by hand, with the heads that the engine itself counts; others are refused in words."""

from typing import Any

import pytest
import vllm.config  # noqa: F401  its modules import each other: this one comes first
from transformers import PreTrainedConfig
from vllm.transformers_utils.model_arch_config_convertor import (
    MODEL_ARCH_CONFIG_CONVERTORS,
    ModelArchConfigConvertorBase,
)

from hotspan.core.errors import ConfigError
from hotspan.plan.shape import LayerKind, ModelShape
from tests.plan.known import KNOWN, REFUSED


@pytest.mark.parametrize("name", KNOWN)
def test_a_published_model_is_sized_as_by_hand(name: str) -> None:
    """Bytes per token, and of a sequence's state where the kind of layer is known."""
    known = KNOWN[name]
    shape = ModelShape.from_config(known.config)
    assert (shape.kv_bytes_per_token, shape.state_bytes) == (known.kv_bytes, known.state_bytes)


def test_the_table_has_forty_models() -> None:
    """Fewer would leave out families that the engine serves."""
    assert len(KNOWN) >= 40


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_sized_is_refused_with_a_reason(name: str) -> None:
    """A figure that ignored what the reason names would be wrong."""
    config, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=reason):
        ModelShape.from_config(config)


def asked(text: dict[str, Any]) -> Any:
    """What the engine makes of a configuration: it knows heads and sizes by the model's type."""
    names = {"n_head": "num_attention_heads", "n_embd": "hidden_size", "n_heads": "num_attention_heads"}
    names |= {"n_layer": "num_hidden_layers", "d_model": "hidden_size", "n_layers": "num_hidden_layers"}
    config = PreTrainedConfig(**{names.get(name, name): value for name, value in text.items()})
    if isinstance(text.get("attn_config"), dict):
        config.attn_config = PreTrainedConfig(**text["attn_config"])
    kind = MODEL_ARCH_CONFIG_CONVERTORS.get(str(text["model_type"]), ModelArchConfigConvertorBase)
    return kind(config, config)


BY_CLASS = {"StarCoder": "gpt_bigcode's class sets one KV head itself", "SantaCoder": "the same"}
DEFAULTS = {"Gemma-3-4B": "published without its heads, which its class has"}


@pytest.mark.parametrize("name", [name for name in KNOWN if name not in BY_CLASS | DEFAULTS])
def test_heads_are_those_that_the_engine_counts(name: str) -> None:
    """KV heads times head size of the engine's own reading of the configuration give the bytes of a layer."""
    config = KNOWN[name].config
    text = config.get("text_config", config)
    shape, engine = ModelShape.from_config(config), asked(text)
    (per_layer,) = {layers.token_bytes for layers in shape.layers if layers.token_bytes}
    if any(layers.kind is LayerKind.LATENT for layers in shape.layers):
        assert per_layer == (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * 2
    else:
        assert per_layer == 2 * engine.get_total_num_kv_heads() * engine.get_head_size() * 2
