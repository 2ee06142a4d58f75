"""Models of true shapes with random weights: a config.json and a tokenizer, made here; the engine makes the weights.

The engine's `load_format` "dummy" fills each weight from a seed of its own, the same at every start.
"""

import json
import shutil
import tempfile
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.demo.model import make_demo_model

_BYTES: Final = 2  # of one bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A dense model's sizes, as its maker's config.json has them (kv_heads: grouped-query attention)."""

    kind: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    max_tokens: int
    rope: MappingProxyType[str, Any]
    eps: float

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim * _BYTES

    @property
    def layer_bytes(self) -> int:
        """Weights of one layer in bfloat16; norms and biases are too small to count."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return _BYTES * (attention + 3 * self.hidden * self.intermediate)

    @property
    def weight_bytes(self) -> int:
        """All weights in bfloat16, the two embeddings included."""
        return self.layers * self.layer_bytes + 2 * _BYTES * self.vocabulary * self.hidden


def _qwen(**sizes: Any) -> Shape:
    rope = MappingProxyType({"rope_theta": 1_000_000.0, "rope_type": "default"})
    return Shape(kind="qwen2", max_tokens=32_768, rope=rope, eps=1e-6, **sizes)


_LLAMA_ROPE: Final = MappingProxyType(
    {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
)

SHAPES: Final = MappingProxyType(
    {
        "tiny": _qwen(
            hidden=256, intermediate=704, layers=4, heads=4, kv_heads=2, head_dim=64, vocabulary=4096
        ),
        "qwen2.5-7b": _qwen(
            hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4, head_dim=128, vocabulary=152_064
        ),
        "llama-3.1-8b": Shape(
            kind="llama",
            hidden=4096,
            intermediate=14336,
            layers=32,
            heads=32,
            kv_heads=8,
            head_dim=128,
            vocabulary=128_256,
            max_tokens=131_072,
            rope=_LLAMA_ROPE,
            eps=1e-5,
        ),
        "qwen2.5-72b-cut": _qwen(
            hidden=8192, intermediate=29568, layers=80, heads=64, kv_heads=8, head_dim=128, vocabulary=152_064
        ),
    }
)  # fmt: skip
"""By name, as in the config.json of Qwen2.5-7B, Llama-3.1-8B and Qwen2.5-72B (Instruct); "tiny" is for CPUs."""

_CUT: Final = "-cut"
_ACTIVATIONS_BYTES: Final = 6 * GIB


def cut_to(name: str, memory_bytes: int, pool_tokens: int) -> Shape:
    """The shape of that name; one to be cut has the layers that fit beside a pool for so many tokens.

    Raises: ConfigError if not even one does.
    """
    shape = SHAPES[name]
    if not name.endswith(_CUT):
        return shape
    embeddings = shape.weight_bytes - shape.layers * shape.layer_bytes
    a_layer = shape.layer_bytes + pool_tokens * shape.kv_bytes_per_token // shape.layers
    layers = min(shape.layers, int(0.9 * memory_bytes - embeddings - _ACTIVATIONS_BYTES) // a_layer)
    if layers < 1:
        raise ConfigError(f"not one layer of {name} fits into {memory_bytes / GIB:.0f} GiB: take a smaller model")
    return replace(shape, layers=layers)


def make_model(directory: Path, shape: Shape) -> Path:
    """`directory` with config.json and a tokenizer of the shape's whole vocabulary; no weights."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        demo = make_demo_model(Path(scratch) / "demo", "tiny" if shape.vocabulary < 10_000 else "demo").path
        tokenizer = json.loads((demo / "tokenizer.json").read_text(encoding="utf-8"))
        for name in ("tokenizer_config.json", "generation_config.json"):
            shutil.copy(demo / name, directory / name)
        ends = json.loads((demo / "config.json").read_text())
    _widen(tokenizer, shape.vocabulary)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    own = json.loads((directory / "tokenizer_config.json").read_text())
    own["model_max_length"] = shape.max_tokens
    (directory / "tokenizer_config.json").write_text(json.dumps(own, indent=2) + "\n")
    config = _config(shape) | {name: ends[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return directory


def _widen(tokenizer: dict[str, Any], vocabulary: int) -> None:
    """Give every id up to `vocabulary` a text of its own, so that whatever the model says is text.

    A text is two known pieces of a word, one after the other, which no merge makes: texts encode as before, and what
    was said is about twice as many tokens when it is sent again.
    """
    known: dict[str, int] = tokenizer["model"]["vocab"]
    space = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}"  # how byte-level tokenizers write a space
    plain = [piece for piece in known if piece.isascii() and piece.isalpha() and len(piece) > 1]
    leading = [piece for piece in known if piece[0] == space and piece[1:].isascii() and piece[1:].isalpha()]
    for first, second in product(sorted(leading), sorted(plain)):
        if len(known) >= vocabulary:
            return
        known.setdefault(first + second, len(known))
    raise ConfigError(f"the tokenizer has pieces for {len(known)} tokens only, not {vocabulary}: take a larger one")


def _config(shape: Shape) -> dict[str, Any]:
    architecture = {"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[shape.kind]
    return {
        "architectures": [architecture],
        "model_type": shape.kind,
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.max_tokens,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_parameters": dict(shape.rope),
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
    } | ({"use_sliding_window": False} if shape.kind == "qwen2" else {"attention_bias": False, "mlp_bias": False})
