"""Configs of published models, cut down to what sizing reads, and a machine to plan for."""

from pathlib import Path
from typing import Any

from hotspan.core.types import GIB
from hotspan.plan.disk import DiskProbe
from hotspan.plan.host import Host
from hotspan.plan.memory import Available, SharedMemory
from hotspan.plan.mounts import Medium

Config = dict[str, Any]

QWEN_7B: Config = {
    "model_type": "qwen2",
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 28,
}
LLAMA_70B: Config = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 163840,
}
GPT_OSS_20B: Config = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 2880,
    "head_dim": 64,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GEMMA3_27B: Config = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "hidden_size": 5376,
        "head_dim": 128,
        "sliding_window": 1024,
    },
    "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152, "num_attention_heads": 16},
}
GEMMA3_4B: Config = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "hidden_size": 2560,
        "sliding_window": 1024,
    },
}
GEMMA2_9B: Config = {
    "model_type": "gemma2",
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "hidden_size": 3584,
    "head_dim": 256,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
}
MISTRAL_7B: Config = {
    "model_type": "mistral",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 32768,
}
QWEN3_NEXT: Config = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "hidden_size": 2048,
    "head_dim": 256,
    "full_attention_interval": 4,
    "torch_dtype": "bfloat16",
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
GRANITE_4: Config = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "torch_dtype": "bfloat16",
    "mamba_n_heads": 128,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "layer_types": (["mamba"] * 9 + ["attention"]) * 4,
}


def machine(
    memory_gib: float = 100, shm_gib: float | None = None, disks: tuple[DiskProbe, ...] = (), why: str = "test"
) -> Host:
    """A machine with so much memory left, all of it in /dev/shm unless said otherwise."""
    shared = int((memory_gib * 2 if shm_gib is None else shm_gib) * GIB)
    return Host(Available(int(memory_gib * GIB), why), SharedMemory(shared, shared), disks)


def drive(free_gib: float, read_gb_s: float | None = 3.0, name: str = "/nvme", held_gib: float = 0) -> DiskProbe:
    """A disk with so much free."""
    return DiskProbe(
        *(Path(name), "ext4", Medium.NVME, int(free_gib * GIB), int(held_gib * GIB), True, read_gb_s, read_gb_s)
    )
