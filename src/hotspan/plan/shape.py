"""What a model keeps of each token, read out of its config.json.

    full attention   2 x KV heads x head size x bytes of a value, for every token
    latent (MLA)     (kv_lora_rank + qk_rope_head_dim) x bytes, for every token, the same on every rank
    sliding window   as full attention; only the window's tokens are needed again
    fixed state      linear attention and state space: so much a sequence, however long it is

The engine's own formulas are vLLM's (vllm/v1/kv_cache_interface.py); tests/plan/test_engine_figures.py compares them.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, Self

from hotspan.core.errors import ConfigError
from hotspan.core.types import CHUNK_TOKENS, PAGE_BYTES, round_up
from hotspan.plan.states import DTYPE_BYTES, state_bytes

Config = Mapping[str, Any]

_KV_BYTES: Final = DTYPE_BYTES | {"fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "fp8_ds_mla": 1}
_DS_MLA_BYTES: Final = 656  # a token and layer: values, rope and scales in one blob (vLLM's flashmla_sparse)
_BLOCK_TOKENS: Final = 16
"""Of the engine's smallest block on GPUs."""
_INDEX_BLOCK: Final = 128  # values of the indexer's key that share a 4-byte scale

_TEXT_CONFIGS: Final = ("text_config", "llm_config", "language_config", "thinker_config")
_STATES: Final = ("linear_attention", "mamba", "mamba1", "mamba2", "conv", "short_conv", "recurrent", "gated_deltanet")
_NOTHING: Final = ("mlp", "moe", "none", "noop")
_TWICE: Final = ("longcat_flash",)
"""Models that attend twice in each layer."""

_BOTH: Final = ("falcon_h1",)
"""Models each of whose layers has attention and a state beside it."""

_UNEQUAL: Final = (
    *("per_layer_config", "block_configs", "compress_ratios", "global_head_dim", "num_global_key_value_heads"),
    *("swa_head_dim", "swa_num_key_value_heads", "num_key_value_heads_per_layer"),
)
"""Keys of models whose layers keep different amounts: a sum that ignored them would be wrong."""

_EVERY: Final = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "cohere2": 4}
"""Every so manyth layer has full attention where the config does not say which ones."""

_LEFT_OUT: Final[Mapping[str, Config]] = {
    "gemma3_text": {
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
    }
}
"""What published configs leave to the defaults of their class."""


class LayerKind(Enum):
    """What a layer keeps."""

    FULL = "full attention"
    LATENT = "latent attention"
    WINDOW = "sliding window"
    STATE = "fixed state"


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of one kind; bytes are those of all ranks together.

    token_bytes: what one of these layers keeps of a token; 0 for fixed state.
    window:      tokens that it looks back, for a sliding window.
    state_bytes: what one of these layers keeps of a sequence, for fixed state; None if it is not known.
    """

    kind: LayerKind
    count: int
    token_bytes: int = 0
    window: int | None = None
    state_bytes: int | None = 0


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model keeps of a text. Bytes are those of all ranks together, replicas counted.

    kv_dtype:   of the KV cache, resolved.
    max_tokens: of a text, as the model's config says; None if it does not.
    """

    layers: tuple[Layers, ...]
    kv_dtype: str
    tensor_parallel: int = 1
    max_tokens: int | None = None

    @classmethod
    def from_config(
        cls, source: Path | str | Config, *, kv_dtype: str = "auto", dtype: str = "auto", tensor_parallel: int = 1
    ) -> Self:
        """The shape of the model whose directory, config.json or parsed config is given.

        kv_dtype, dtype: the engine's --kv-cache-dtype and --dtype.
        Raises: ConfigError that says what is missing, or what hotspan can't size.
        """
        config, name = _read(source)
        if tensor_parallel < 1:
            raise ConfigError(f"a tensor-parallel size of {tensor_parallel} is none: give at least 1")
        try:
            return cls._parsed(config, name, kv_dtype, dtype, tensor_parallel)
        except (AttributeError, KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"{name} can't be understood: {error}") from error

    @classmethod
    def _parsed(cls, config: Config, name: str, kv_dtype: str, dtype: str, tensor_parallel: int) -> Self:
        text = _text(config)
        text = {**_LEFT_OUT.get(str(text.get("model_type")), {}), **text}
        for key in _UNEQUAL:
            if text.get(key):
                raise ConfigError(f"{name} has {key}: its layers keep different amounts, which hotspan can't size yet")
        model_dtype = _model_dtype(config, text, dtype)
        kv_dtype = _kv_dtype(config, kv_dtype, model_dtype)
        token = _TokenSize(text, name, kv_dtype, tensor_parallel)
        kinds = _kinds(text, name)
        layers = []
        for kind, window in dict.fromkeys(kinds):
            count = kinds.count((kind, window))
            if kind is LayerKind.STATE:
                layers.append(Layers(kind, count, state_bytes=state_bytes(text, DTYPE_BYTES[model_dtype])))
            else:
                layers.append(Layers(kind, count, token.bytes_of(kind), window))
        longest = text.get("max_position_embeddings") or text.get("max_seq_len") or text.get("n_positions")
        return cls(tuple(layers), kv_dtype, tensor_parallel, longest if isinstance(longest, int) else None)

    @property
    def kv_bytes_per_token(self) -> int:
        """What all layers keep of one token."""
        return sum(layers.count * layers.token_bytes for layers in self.layers)

    @property
    def state_bytes(self) -> int | None:
        """What the layers of fixed state keep of one sequence; None if it is not known."""
        if any(layers.state_bytes is None for layers in self.layers):
            return None
        return sum(layers.count * (layers.state_bytes or 0) for layers in self.layers)

    @property
    def copies(self) -> int:
        """How many ranks hold the same KV, of which a tier has one copy: all of them where each layer keeps latents."""
        return self.tensor_parallel if {layers.kind for layers in self.layers} == {LayerKind.LATENT} else 1

    @property
    def tier_bytes_per_token(self) -> int:
        """What one token takes in a tier: one copy of `kv_bytes_per_token`, and what equal slots waste.

        The engine cuts layers of several kinds into groups of as many layers each, and fills the last one up:

            5 full + 8 window  ->  [5 full] [5 window] [3 window + 2 empty]
        """
        kept = [layers for layers in self.layers if layers.token_bytes]
        if len({layers.token_bytes for layers in kept}) != 1:
            return self.kv_bytes_per_token // self.copies
        counts = [layers.count for layers in kept]
        size = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
        return sum(-(-count // size) * size for count in counts) * kept[0].token_bytes // self.copies

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, where nothing else is said: a whole number of the engine's blocks.

        Beside layers of fixed state, a block of attention has so many tokens that it is as large as a layer's state.
        """
        state = max((layers.state_bytes or 0 for layers in self.layers), default=0)
        token = max((layers.token_bytes for layers in self.layers), default=0)
        block = round_up(-(-state // token), _BLOCK_TOKENS) if state and token else 1
        return round_up(CHUNK_TOKENS, block)

    @property
    def chunk_bytes(self) -> int:
        """What one chunk takes in a tier, the state at its end included."""
        return round_up(max(1, self.chunk_tokens * self.tier_bytes_per_token + (self.state_bytes or 0)), PAGE_BYTES)

    def text_bytes(self, tokens: int) -> int:
        """What a text of so many tokens takes in a tier: sliding windows are kept for all of it."""
        return tokens // self.chunk_tokens * self.chunk_bytes

    def load_bytes(self, tokens: int) -> int:
        """What all ranks load when a text of so many tokens is a hit: of a sliding window only its last tokens."""
        needed = (min(tokens, layers.window or tokens) * layers.count * layers.token_bytes for layers in self.layers)
        return sum(needed) + (self.state_bytes or 0)

    def describe(self) -> str:
        """The layers in words."""
        return ", ".join(
            f"{layers.count} layer{'s' if layers.count != 1 else ''} of {layers.kind.value}"
            + (f" ({layers.window:,} tokens)" if layers.window else "")
            for layers in self.layers
        )


def _read(source: Path | str | Config) -> tuple[Config, str]:
    if isinstance(source, Mapping):
        return source, "the config"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} can't be read ({error}): give the directory of a Hugging Face model") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object: give the directory of a Hugging Face model")
    return config, str(path)


def _text(config: Config) -> Config:
    """The part about the language model, where there is one beside it that sees or hears."""
    for name in _TEXT_CONFIGS:
        if isinstance(inner := config.get(name), Mapping):
            return _text(inner)
    return config


def _model_dtype(config: Config, text: Config, dtype: str) -> str:
    """The dtype that the engine computes in: for models in float32 its "auto" means 16 bits."""
    if dtype != "auto":
        if dtype not in DTYPE_BYTES:
            raise ConfigError(f"--dtype {dtype} is unknown: give auto, bfloat16, float16 or float32")
        return dtype
    said = text.get("dtype") or text.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype")
    name = str(said).removeprefix("torch.")
    return name if name in ("float16", "bfloat16") else "bfloat16"


def _kv_dtype(config: Config, kv_dtype: str, model_dtype: str) -> str:
    """The dtype of the KV cache; "auto" is the model's own, or what its quantisation says of the cache."""
    if kv_dtype == "auto":
        quantization = config.get("quantization_config") or config.get("compression_config") or {}
        inner = quantization.get("quantization") or quantization
        scheme = inner.get("kv_cache_scheme") or quantization.get("kv_cache_scheme") or {}
        said = inner.get("kv_cache_quant_algo") or quantization.get("kv_cache_quant_algo") or ""
        is_fp8 = isinstance(scheme, Mapping) and scheme.get("num_bits") == 8 and scheme.get("type") == "float"
        return "fp8" if is_fp8 or str(said).lower() == "fp8" else model_dtype
    if kv_dtype in _KV_BYTES:
        return kv_dtype
    raise ConfigError(f"--kv-cache-dtype {kv_dtype}: hotspan can size auto, bfloat16, float16, float32 and fp8 only")


class _TokenSize:
    """Bytes that one layer keeps of one token, over all ranks."""

    def __init__(self, text: Config, name: str, kv_dtype: str, tensor_parallel: int) -> None:
        self._text = text
        self._name = name
        self._kv_dtype = kv_dtype
        self._value_bytes = _KV_BYTES[kv_dtype]
        self._ranks = tensor_parallel

    def bytes_of(self, kind: LayerKind) -> int:
        if kind is LayerKind.LATENT:
            return self._latent()
        heads = self._number("num_attention_heads", "n_head", "num_heads", "n_heads")
        kv_heads = self._kv_heads(heads)
        size = self._number("head_dim", "hidden_size_per_head", "kv_channels", "attention_head_dim", or_=0)
        size = size or self._number("hidden_size", "n_embd", "d_model", "n_embed") // heads
        if kv_heads % self._ranks and self._ranks % kv_heads:
            raise ConfigError(
                f"{self._name}: {kv_heads} KV heads can't be split over {self._ranks} ranks: give a --tp that divides "
                "them, or a multiple of them"
            )
        return self._ranks * max(1, kv_heads // self._ranks) * 2 * size * self._value_bytes

    def _kv_heads(self, heads: int) -> int:
        """KV heads of a layer. Whatever key says that there are fewer than heads must be known here.

        Falcon's new architecture ignores its multi_query; ChatGLM's counts with multi_query_attention alone.
        """
        text = self._text
        if text.get("multi_query") is True and not text.get("new_decoder_architecture"):
            return 1
        if text.get("multi_query_attention") is False:
            return heads
        inner = text.get("attn_config")
        if isinstance(inner, Mapping):
            return _number(inner, self._name, "kv_n_heads", or_=heads)
        names = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "num_attention_groups")
        return self._number(*names, or_=heads)

    def _latent(self) -> int:
        latent = self._number("kv_lora_rank") + self._number("qk_rope_head_dim", or_=0)
        values = _DS_MLA_BYTES if self._kv_dtype == "fp8_ds_mla" else latent * self._value_bytes
        index = self._number("index_head_dim", or_=0)
        return self._ranks * (values + index + index // _INDEX_BLOCK * 4)

    def _number(self, *names: str, or_: int | None = None) -> int:
        """The first of these keys that is there."""
        return _number(self._text, self._name, *names, or_=or_)


def _number(text: Config, name: str, *keys: str, or_: int | None = None) -> int:
    for key in keys:
        value = text.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {key} is {value!r} and should be a positive number")
        return value
    if or_ is None:
        raise ConfigError(f"{name} lacks {keys[0]}: the size of this model's KV can't be told")
    return or_


def _kinds(text: Config, name: str) -> list[tuple[LayerKind, int | None]]:
    """What each layer keeps, and its window; layers that reuse another's KV or keep none are left out."""
    count = _number(text, name, "num_hidden_layers", "n_layer", "num_layers", "n_layers")
    if text.get("model_type") in _TWICE:
        count = 2 * _number(text, name, "num_layers")
    window = text.get("sliding_window")
    if text.get("use_sliding_window", not str(text.get("model_type")).startswith("qwen")) is False:
        window = None
    window = window if isinstance(window, int) and window > 0 else None
    plain = LayerKind.LATENT if text.get("kv_lora_rank") and text.get("model_type") != "minicpm3" else LayerKind.FULL
    kinds: list[tuple[LayerKind, int | None]] = []
    for word in _words(text, count, has_window=window is not None):
        if word in _STATES:
            kinds.append((LayerKind.STATE, None))
        elif word == "both":
            kinds += [(LayerKind.STATE, None), (plain, None)]
        elif word == "sliding_attention" and window is not None:
            kinds.append((LayerKind.WINDOW, window))
        elif word in ("full_attention", "attention", "sliding_attention", "chunked_attention"):
            kinds.append((plain, None))
        elif word not in _NOTHING:
            raise ConfigError(f"{name} has layers of type {word!r}, which hotspan can't size yet")
    if not kinds:
        raise ConfigError(f"{name} has no layer that keeps anything")
    return kinds


def _words(text: Config, count: int, *, has_window: bool) -> Sequence[str]:
    """The type of each layer, in the words of `layer_types`, however the config says it."""
    listed = text.get("layer_types") or text.get("layers_block_type")
    if listed:
        words = [str(word) for word in listed]
    elif pattern := text.get("hybrid_override_pattern"):
        words = [{"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}.get(sign, sign) for sign in str(pattern)]
    elif isinstance(linear := text.get("linear_attn_config"), Mapping):
        full = linear["full_attn_layers"]  # counted from 1
        words = ["full_attention" if index + 1 in full else "linear_attention" for index in range(count)]
    elif text.get("model_type") in _BOTH:
        words = ["both"] * count
    elif flags := text.get("attn_type_list"):
        words = ["attention" if flag == 1 else "linear_attention" for flag in flags]
    elif indices := text.get("attn_layer_indices"):
        words = ["attention" if index in indices else "mamba2" for index in range(count)]
    elif period := text.get("attn_layer_period"):
        offset = text.get("attn_layer_offset") or 0
        words = ["attention" if index % period == offset else "mamba" for index in range(count)]
    elif interval := text.get("full_attention_interval"):
        words = ["linear_attention" if (index + 1) % interval else "full_attention" for index in range(count)]
    elif not has_window:
        words = ["full_attention"] * count
    else:
        words = _window_words(text, count)
    return words[: count - (text.get("num_kv_shared_layers") or 0)]


def _window_words(text: Config, count: int) -> list[str]:
    every = text.get("sliding_window_pattern") or _EVERY.get(str(text.get("model_type"))) or math.inf
    first = (text.get("max_window_layers") or 0) if text.get("use_sliding_window") else 0
    return [
        "sliding_attention" if index >= first and (index + 1) % every else "full_attention" for index in range(count)
    ]
