"""The model families that hotspan is tried with, each as a tiny shape: for the tests, and for the table in the docs.

A shape has what decides how KV lies in memory (kinds of layers, windows, latents, states, heads), and little else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

VOCABULARY: Final = 1024
SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 1,
        "eos_token_id": 0,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
)
HEADS: Final[Mapping[str, Any]] = MappingProxyType({"head_dim": 32})


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family, and the shape that stands for it.

    name:         what the docs call it.
    config:       transformers' configuration class. fields: what it is made of.
    keeps:        what the cache holds of it, for the docs.
    architecture: of vLLM, where transformers' name is another.
    dtype:        of the engine: float32, unless the CPU build computes it in bfloat16 only.
    engine:       further options of the engine.
    in_gate:      `make test` has it, too.
    dense:        fields that take its experts away; None if it has none, or can't do without.
    has_experts:  in this shape.
    """

    name: str
    config: str
    fields: Mapping[str, Any]
    keeps: str = "full attention"
    architecture: str | None = None
    dtype: str = "float32"
    engine: Mapping[str, Any] = field(default_factory=dict)
    in_gate: bool = False
    dense: Mapping[str, Any] | None = None
    has_experts: bool = False

    @property
    def lora(self) -> str:
        """How it is tried with LoRA, for the docs: vLLM's CPU build has no experts with LoRA."""
        if not self.has_experts:
            return "yes"
        return "no" if self.dense is None else "without experts"

    def __str__(self) -> str:
        return self.name.lower().replace(" ", "-").replace(",", "")


_MLA: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 64,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
)
_DEEPSEEK3: Final[Mapping[str, Any]] = MappingProxyType(
    {**SIZES, **_MLA, "q_lora_rank": 64, "num_mtp_layers": 0, "topk_method": "noaux_tc"}
)
_LATENT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "dtype": "bfloat16",
        "engine": {"block_size": None},  # the CPU build chooses both
        "has_experts": True,
        "dense": {"first_k_dense_replace": SIZES["num_hidden_layers"]},
    }
)

FAMILIES: Final = (
    Family(name="Llama", config="LlamaConfig", fields={**SIZES, **HEADS}),
    Family(
        name="Llama, fp8 KV",
        config="LlamaConfig",
        fields={**SIZES, **HEADS},
        keeps="full attention in eight bits",
        engine={"kv_cache_dtype": "fp8"},
    ),
    Family(name="Qwen2", config="Qwen2Config", fields={**SIZES}),
    Family(name="Qwen3", config="Qwen3Config", fields={**SIZES, **HEADS}),
    Family(
        name="Qwen3-MoE",
        config="Qwen3MoeConfig",
        fields={**SIZES, **HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
        has_experts=True,
    ),
    Family(
        name="Mistral, windows",
        config="MistralConfig",
        fields={**SIZES, **HEADS, "sliding_window": 512},
        keeps="sliding windows only",
    ),
    Family(name="Mistral", config="MistralConfig", fields={**SIZES, **HEADS, "sliding_window": None}),
    Family(name="Ministral 3", config="Ministral3Config", fields={**SIZES, **HEADS, "max_position_embeddings": 262144}),
    Family(
        name="Mistral Large 3",
        config="DeepseekV3Config",
        fields=_DEEPSEEK3,
        keeps="latents (MLA)",
        architecture="MistralLarge3ForCausalLM",
        **_LATENT,
    ),
    Family(
        name="Gemma3",
        config="Gemma3TextConfig",
        fields={
            **SIZES,
            **HEADS,
            "num_hidden_layers": 6,
            "sliding_window": 512,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 32,
        },
        keeps="full attention beside sliding windows",
        in_gate=True,
    ),
    Family(
        name="GPT-OSS",
        config="GptOssConfig",
        fields={
            **SIZES,
            **HEADS,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        keeps="full attention beside sliding windows, with sinks",
        has_experts=True,
        dtype="bfloat16",
    ),
    Family(
        name="DeepSeek-V2",
        config="DeepseekV2Config",
        fields={**SIZES, **_MLA, "q_lora_rank": None, "topk_method": "greedy"},
        keeps="latents (MLA)",
        **_LATENT,
    ),
    Family(name="DeepSeek-V3", config="DeepseekV3Config", fields=_DEEPSEEK3, keeps="latents (MLA)", **_LATENT),
    Family(
        name="Qwen3-Next",
        config="Qwen3NextConfig",
        fields={
            **SIZES,
            "head_dim": 64,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
        },
        keeps="full attention beside the states of gated delta nets",
        has_experts=True,
        dtype="bfloat16",
    ),
)
