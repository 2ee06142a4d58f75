"""The model families that hotspan is tried with, each as a tiny shape: for the tests, and for the table in the docs.

A shape has what decides how KV lies in memory (kinds of layers, windows, latents, states, heads), and little else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

VOCABULARY: Final = 1024
SIZES: Final = MappingProxyType(
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
HEADS: Final = MappingProxyType({"head_dim": 32})


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
    """

    name: str
    config: str
    fields: Mapping[str, Any]
    keeps: str = "full attention"
    architecture: str | None = None
    dtype: str = "float32"
    engine: Mapping[str, Any] = field(default_factory=dict)
    in_gate: bool = False

    def __str__(self) -> str:
        return self.name.lower().replace(" ", "-").replace(",", "")


FAMILIES: Final = (
    Family(name="Llama", config="LlamaConfig", fields={**SIZES, **HEADS}),
    Family(
        name="Llama, fp8 KV",
        config="LlamaConfig",
        fields={**SIZES, **HEADS},
        keeps="full attention in eight bits",
        engine={"kv_cache_dtype": "fp8"},
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
)
