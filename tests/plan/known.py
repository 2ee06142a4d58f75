"""What a token takes in published models: the parts of their config.json that sizing reads, and the figure by hand.

Each figure is written as layers x (keys and values) x KV heads x head size x bytes, so that a reader can check it.
"""

from typing import Any, Final, NamedTuple

from tests.plan import models


class Known(NamedTuple):
    """kv_bytes: of one token. state_bytes: of one sequence; None for a kind whose size hotspan does not know."""

    config: dict[str, Any]
    kv_bytes: int
    state_bytes: int | None = 0


def _plain(kind: str, layers: int, heads: int, kv_heads: int | None, hidden: int, **more: Any) -> dict[str, Any]:
    config = {"model_type": kind, "num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": hidden}
    return config | ({} if kv_heads is None else {"num_key_value_heads": kv_heads}) | {"dtype": "bfloat16"} | more


def _gpt(kind: str, layers: int, heads: int, width: int, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "n_layer": layers, "n_head": heads, "n_embd": width, "dtype": "bfloat16", **more}


def _mla(kind: str, layers: int, heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    return (
        _plain(kind, layers, heads, heads, hidden, kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128) | more
    )


KIMI_LINEAR: Final = _mla("kimi_linear", 27, 32, 2304, head_dim=72) | {
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
    }
}
FALCON_H1: Final = _plain("falcon_h1", 36, 12, 2, 3072, head_dim=128) | {
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 24,
    "mamba_d_head": 128,
    "mamba_d_state": 256,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
}
JAMBA: Final = _plain("jamba", 32, 32, 8, 4096, attn_layer_period=8, attn_layer_offset=4)
MINIMAX: Final = _plain("minimax", 80, 64, 8, 6144, head_dim=128, attn_type_list=([0] * 7 + [1]) * 10)
_GDN: Final = 3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 2
_GRANITE: Final = 3 * (128 * 64 + 2 * 128) * 2 + 128 * 64 * 128 * 2
_KDA: Final = 3 * (3 * 32 * 128) * 2 + 32 * 128 * 128 * 4
_H1: Final = 3 * (3072 + 2 * 256) * 2 + 3072 * 256 * 2

KNOWN: Final[dict[str, Known]] = {
    "Falcon-7B": Known(
        _plain("falcon", 32, 71, None, 4544, multi_query=True, new_decoder_architecture=False), 32 * 2 * 1 * 64 * 2
    ),
    "Falcon-40B": Known(
        _plain("falcon", 60, 128, None, 8192, num_kv_heads=8, multi_query=True, new_decoder_architecture=True),
        60 * 2 * 8 * 64 * 2,
    ),
    "Falcon-RW-1B": Known(
        _plain("falcon", 24, 32, None, 2048, multi_query=False, new_decoder_architecture=False), 24 * 2 * 32 * 64 * 2
    ),
    "Falcon3-7B": Known(_plain("llama", 28, 12, 4, 3072, head_dim=256), 28 * 2 * 4 * 256 * 2),
    "StarCoder": Known(_gpt("gpt_bigcode", 40, 48, 6144, multi_query=True), 40 * 2 * 1 * 128 * 2),
    "SantaCoder": Known(_gpt("gpt_bigcode", 24, 16, 2048, multi_query=True), 24 * 2 * 1 * 128 * 2),
    "StarCoder2-7B": Known(_plain("starcoder2", 32, 36, 4, 4608), 32 * 2 * 4 * 128 * 2),
    "Kimi-Linear-48B": Known(KIMI_LINEAR, 7 * (512 + 64) * 2, 20 * _KDA),
    "Kimi-K2": Known(_mla("kimi_k2", 61, 64, 7168), 61 * (512 + 64) * 2),
    "DeepSeek-V2-Lite": Known(_mla("deepseek_v2", 27, 16, 2048), 27 * (512 + 64) * 2),
    "DeepSeek-V3": Known(models.DEEPSEEK_V3, 61 * (512 + 64) * 2),
    "LongCat-Flash": Known(
        _mla("longcat_flash", 28, 64, 6144, num_layers=28),
        2 * 28 * (512 + 64) * 2,
    ),
    "DeepSeek-LLM-7B": Known(_plain("llama", 30, 32, 32, 4096), 30 * 2 * 32 * 128 * 2),
    "Llama-2-7B": Known(_plain("llama", 32, 32, 32, 4096), 32 * 2 * 32 * 128 * 2),
    "Llama-3.1-8B": Known(_plain("llama", 32, 32, 8, 4096), 32 * 2 * 8 * 128 * 2),
    "Llama-3.1-70B": Known(models.LLAMA_70B, 80 * 2 * 8 * 128 * 2),
    "Llama-3.1-405B": Known(_plain("llama", 126, 128, 8, 16384), 126 * 2 * 8 * 128 * 2),
    "Llama-3.2-1B": Known(_plain("llama", 16, 32, 8, 2048, head_dim=64), 16 * 2 * 8 * 64 * 2),
    "SmolLM2-135M": Known(_plain("llama", 30, 9, 3, 576), 30 * 2 * 3 * 64 * 2),
    "Mistral-7B-v0.3": Known(_plain("mistral", 32, 32, 8, 4096, sliding_window=None), 32 * 2 * 8 * 128 * 2),
    "Mistral-Nemo-12B": Known(_plain("mistral", 40, 32, 8, 5120, head_dim=128), 40 * 2 * 8 * 128 * 2),
    "Mixtral-8x7B": Known(_plain("mixtral", 32, 32, 8, 4096), 32 * 2 * 8 * 128 * 2),
    "Qwen2.5-7B": Known(models.QWEN_7B, 28 * 2 * 4 * 128 * 2),
    "Qwen2.5-0.5B": Known(_plain("qwen2", 24, 14, 2, 896), 24 * 2 * 2 * 64 * 2),
    "Qwen3-8B": Known(_plain("qwen3", 36, 32, 8, 4096, head_dim=128), 36 * 2 * 8 * 128 * 2),
    "Qwen3-30B-A3B": Known(_plain("qwen3_moe", 48, 32, 4, 2048, head_dim=128), 48 * 2 * 4 * 128 * 2),
    "Qwen3-Next-80B": Known(models.QWEN3_NEXT, 12 * 2 * 2 * 256 * 2, 36 * _GDN),
    "Gemma-7B": Known(_plain("gemma", 28, 16, 16, 3072, head_dim=256), 28 * 2 * 16 * 256 * 2),
    "Gemma-2B": Known(_plain("gemma", 18, 8, 1, 2048, head_dim=256), 18 * 2 * 1 * 256 * 2),
    "Gemma-2-9B": Known(models.GEMMA2_9B, 42 * 2 * 8 * 256 * 2),
    "Gemma-3-4B": Known(models.GEMMA3_4B, 34 * 2 * 4 * 256 * 2),
    "Gemma-3-27B": Known(models.GEMMA3_27B, 62 * 2 * 16 * 128 * 2),
    "gpt-oss-20b": Known(models.GPT_OSS_20B, 24 * 2 * 8 * 64 * 2),
    "Phi-2": Known(_plain("phi", 32, 32, 32, 2560), 32 * 2 * 32 * 80 * 2),
    "Phi-4": Known(_plain("phi3", 40, 40, 10, 5120), 40 * 2 * 10 * 128 * 2),
    "GPT-2": Known(_gpt("gpt2", 12, 12, 768), 12 * 2 * 12 * 64 * 2),
    "GPT-J-6B": Known(_gpt("gptj", 28, 16, 4096), 28 * 2 * 16 * 256 * 2),
    "GPT-NeoX-20B": Known(_plain("gpt_neox", 44, 64, None, 6144), 44 * 2 * 64 * 96 * 2),
    "BLOOM-7B1": Known(
        {"model_type": "bloom", "n_layer": 30, "n_head": 32, "hidden_size": 4096, "dtype": "bfloat16"},
        30 * 2 * 32 * 128 * 2,
    ),
    "OPT-6.7B": Known(_plain("opt", 32, 32, None, 4096), 32 * 2 * 32 * 128 * 2),
    "DBRX": Known(
        {
            "model_type": "dbrx",
            "n_layers": 40,
            "n_heads": 48,
            "d_model": 6144,
            "dtype": "bfloat16",
            "attn_config": {"kv_n_heads": 8},
        },
        40 * 2 * 8 * 128 * 2,
    ),
    "MPT-7B": Known(
        {"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096, "attn_config": {}, "dtype": "bfloat16"},
        32 * 2 * 32 * 128 * 2,
    ),
    "ChatGLM3-6B": Known(
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 128,
            "dtype": "bfloat16",
        },
        28 * 2 * 2 * 128 * 2,
    ),
    "GLM-4-9B": Known(_plain("glm4", 40, 32, 2, 4096, head_dim=128), 40 * 2 * 2 * 128 * 2),
    "Command-R": Known(_plain("cohere", 40, 64, 64, 8192), 40 * 2 * 64 * 128 * 2),
    "InternLM2-7B": Known(_plain("internlm2", 32, 32, 8, 4096), 32 * 2 * 8 * 128 * 2),
    "OLMo-2-7B": Known(_plain("olmo2", 32, 32, 32, 4096), 32 * 2 * 32 * 128 * 2),
    "Granite-4.0-H-Small": Known(models.GRANITE_4, 4 * 2 * 8 * 128 * 2, 36 * _GRANITE),
    "Jamba-v0.1": Known(JAMBA, 4 * 2 * 8 * 128 * 2, None),
    "MiniMax-Text-01": Known(MINIMAX, 10 * 2 * 8 * 128 * 2, None),
    "Falcon-H1-7B": Known(FALCON_H1, 36 * 2 * 2 * 128 * 2, 36 * _H1),
}

REFUSED: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "Mamba-2.8B": ({"model_type": "mamba", "num_hidden_layers": 64, "hidden_size": 2560}, "lacks num_attention_heads"),
    "Nemotron-51B": (_plain("nemotron-nas", 80, 64, None, 8192, block_configs=[{}]), "block_configs"),
    "Gemma-4": (_plain("gemma4_text", 30, 8, 4, 2560, global_head_dim=512), "global_head_dim"),
    "MiMo-V2": (_plain("mimo_v2", 48, 64, 4, 4096, swa_head_dim=192), "swa_head_dim"),
    "Zamba2-7B": (_plain("zamba2", 2, 32, 32, 3584, layers_block_type=["mamba", "hybrid"]), "hybrid"),
    "Whisper": ({"model_type": "whisper", "decoder_layers": 32, "d_model": 1280}, "lacks num_hidden_layers"),
}
"""Models that are not sized, with what the reason names."""
