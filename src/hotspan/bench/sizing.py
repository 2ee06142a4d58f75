"""How many tokens' KV fit into a GiB, out of a model's config.json."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hotspan.core.errors import ConfigError

GIB: Final = 1 << 30

_DTYPE_BYTES: Final = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "half": 2,
    "float": 4,
    "fp8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def kv_bytes_per_token(directory: Path) -> int:
    """Bytes of KV for one token of the model in `directory`, over all ranks: 2 x layers x KV heads x head size x dtype.

    Raises: ConfigError if there is no config.json, or its architecture has another KV layout.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error}); pass --tokens-per-gb-kvcache instead") from error
    text: Mapping[str, Any] = config.get("text_config") or config
    if text.get("kv_lora_rank"):
        raise ConfigError(
            f"{path}: a model with latent attention has no KV heads; pass --tokens-per-gb-kvcache instead"
        )
    try:
        heads = int(text["num_attention_heads"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        layers = int(text["num_hidden_layers"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} lacks {error}; pass --tokens-per-gb-kvcache instead") from error
    dtype = str(text.get("dtype") or text.get("torch_dtype") or config.get("torch_dtype") or "bfloat16")
    return 2 * layers * kv_heads * head_dim * _DTYPE_BYTES.get(dtype.removeprefix("torch."), 2)


def tokens_per_gib(directory: Path) -> int:
    """Tokens whose KV fills one GiB."""
    return GIB // kv_bytes_per_token(directory)
