"""What a layer of fixed state keeps of a sequence: linear attention and state space models."""

from collections.abc import Mapping
from typing import Any, Final

DTYPE_BYTES: Final = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def state_bytes(text: Mapping[str, Any], value_bytes: int) -> int | None:
    """Bytes of one layer's state over all ranks; None for kinds that hotspan does not know.

    text:        the config of the language model.
    value_bytes: of the model's dtype; the recurrent part may have its own.
    Source: vLLM's MambaStateShapeCalculator (model_executor/layers/mamba/mamba_utils.py).
    """
    recurrent_bytes = DTYPE_BYTES.get(str(text.get("mamba_ssm_dtype")), value_bytes)
    try:
        if "linear_num_value_heads" in text:
            return _gated_delta_net(text, value_bytes, recurrent_bytes)
        if isinstance(text.get("linear_attn_config"), Mapping):
            return _kimi_delta_attention(text["linear_attn_config"], value_bytes)
        if "mamba_n_heads" in text or "mamba_num_heads" in text:
            return _mamba2(text, value_bytes, recurrent_bytes)
    except (KeyError, TypeError, ValueError):
        return None
    return None


def _gated_delta_net(text: Mapping[str, Any], value_bytes: int, recurrent_bytes: int) -> int:
    keys = int(text["linear_num_key_heads"]) * int(text["linear_key_head_dim"])
    values = int(text["linear_num_value_heads"]) * int(text["linear_value_head_dim"])
    convolution = (2 * keys + values) * (int(text["linear_conv_kernel_dim"]) - 1)
    return convolution * value_bytes + values * int(text["linear_key_head_dim"]) * recurrent_bytes


def _kimi_delta_attention(linear: Mapping[str, Any], value_bytes: int) -> int:
    values = int(linear["num_heads"]) * int(linear["head_dim"])
    convolution = 3 * values * (int(linear["short_conv_kernel_size"]) - 1)
    return convolution * value_bytes + values * int(linear["head_dim"]) * 4  # vLLM keeps it in float32


def _mamba2(text: Mapping[str, Any], value_bytes: int, recurrent_bytes: int) -> int:
    heads = int(text.get("mamba_n_heads") or text["mamba_num_heads"])
    head_size = int(text.get("mamba_d_head") or text["mamba_head_dim"])
    states = int(text.get("mamba_d_state") or text["ssm_state_size"])
    groups = int(text.get("mamba_n_groups") or text["n_groups"])
    kernel = int(text.get("mamba_d_conv") or text["conv_kernel"])
    inner = int(text.get("mamba_d_ssm") or heads * head_size)
    return (inner + 2 * groups * states) * (kernel - 1) * value_bytes + inner * states * recurrent_bytes
