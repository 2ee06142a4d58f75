"""A language model made on the spot: real architecture, random weights, no download.

What it writes is nonsense, but it costs what a model of its shape costs, and its output depends on every token before:
enough to show and to test a cache, on any machine, with no network.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from hotspan.bench.prose import prose
from hotspan.core.errors import ConfigError
from hotspan.demo.files import Tensor, publish, write_json, write_safetensors
from hotspan.plan.shape import ModelShape

# Raise it with every change of what gets written, so that an older directory is not taken for the same.
VERSION: Final = 1
MAX_TOKENS: Final = 32768
SPECIAL_TOKENS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_BYTES: Final = 2  # of one bfloat16
# Large enough that attention is peaked: what the model says depends on the very first token, so wrong KV would show.
_MATRIX_STD: Final = 0.06
_BIAS_STD: Final = 0.02
_TOKENIZER_WORDS: Final = 120_000

# Where transformers cuts text before BPE for every model of type qwen2, whatever tokenizer.json says; written there
# too, so that who reads the file with the tokenizers library alone counts the same tokens.
_WORD_PATTERN: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# ChatML, the format of the Qwen2 family.
_CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that make a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


SIZES: Final = MappingProxyType(
    {
        "tiny": Shape(hidden=256, intermediate=704, layers=4, heads=4, kv_heads=2, vocabulary=768),
        "demo": Shape(hidden=768, intermediate=2048, layers=10, heads=12, kv_heads=4, vocabulary=2048),
    }
)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """A model directory that an engine can serve.

    parameters:         number of weights.
    kv_bytes_per_token: in bfloat16, all layers.
    weight_bytes:       size of its safetensors file's data.
    """

    path: Path
    size: str
    parameters: int
    kv_bytes_per_token: int
    weight_bytes: int
    vocabulary: int
    max_tokens: int


def make_demo_model(directory: Path, size: str = "demo") -> DemoModel:
    """A model of `size` ("tiny", 3 M parameters, or "demo", 66 M) in `directory`, made now or found there.

    The same bytes every time on one version of numpy and tokenizers. Takes a few seconds; appears all at once.

    Raises: ConfigError if the size is unknown, or the directory holds anything else.
    """
    if size not in SIZES:
        raise ConfigError(f"There is no demo model of size {size!r}. Choose one of: {', '.join(SIZES)}.")
    shape = SIZES[size]
    tensors = tuple(_tensors(shape))

    def write(path: Path) -> None:
        write_safetensors(path / "model.safetensors", tensors, seed=VERSION)
        write_json(path / "config.json", _config(shape))
        write_json(path / "generation_config.json", _generation_config())
        write_json(path / "tokenizer_config.json", _tokenizer_config())
        (path / "tokenizer.json").write_text(_tokenizer(shape.vocabulary).to_str(pretty=True), encoding="utf-8")

    publish(directory, {"made_by": "hotspan demo-model", "size": size, "version": VERSION}, write)
    parameters = sum(tensor.elements for tensor in tensors)
    return DemoModel(
        path=directory,
        size=size,
        parameters=parameters,
        kv_bytes_per_token=ModelShape.from_config(_config(shape)).kv_bytes_per_token,
        weight_bytes=_BYTES * parameters,
        vocabulary=shape.vocabulary,
        max_tokens=MAX_TOKENS,
    )


def _tensors(shape: Shape) -> Iterator[Tensor]:
    """All weights, under the names that Qwen2 has in transformers."""

    def norm(name: str) -> Tensor:
        return Tensor(f"{name}.weight", (shape.hidden,), std=0.0, mean=1.0)

    def linear(name: str, outputs: int, inputs: int) -> Tensor:
        return Tensor(f"{name}.weight", (outputs, inputs), _MATRIX_STD)

    yield linear("model.embed_tokens", shape.vocabulary, shape.hidden)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}"
        kv_width = shape.kv_heads * shape.head_dim
        yield norm(f"{prefix}.input_layernorm")
        for projection, width in (("q_proj", shape.hidden), ("k_proj", kv_width), ("v_proj", kv_width)):
            yield linear(f"{prefix}.self_attn.{projection}", width, shape.hidden)
            yield Tensor(f"{prefix}.self_attn.{projection}.bias", (width,), _BIAS_STD)
        yield linear(f"{prefix}.self_attn.o_proj", shape.hidden, shape.hidden)
        yield norm(f"{prefix}.post_attention_layernorm")
        yield linear(f"{prefix}.mlp.gate_proj", shape.intermediate, shape.hidden)
        yield linear(f"{prefix}.mlp.up_proj", shape.intermediate, shape.hidden)
        yield linear(f"{prefix}.mlp.down_proj", shape.hidden, shape.intermediate)
    yield norm("model.norm")
    # Zero rows give the special tokens a logit of 0, far below the largest of the others: greedy decoding never ends a
    # text early.
    head = (shape.vocabulary, shape.hidden)
    yield Tensor("lm_head.weight", head, _MATRIX_STD, zero_rows=tuple(range(len(SPECIAL_TOKENS))))


def _tokenizer(vocabulary: int) -> Tokenizer:
    """A byte-level BPE tokenizer of exactly `vocabulary` tokens, trained on our prose; any NFC text round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose(VERSION, _TOKENIZER_WORDS).splitlines(), trainer)
    return tokenizer


def _config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": MAX_TOKENS,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "initializer_range": _MATRIX_STD,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": _token_id("<|im_end|>"),
        "pad_token_id": _token_id("<|endoftext|>"),
    }


def _generation_config() -> dict[str, Any]:
    return {
        "eos_token_id": [_token_id("<|im_end|>"), _token_id("<|endoftext|>")],
        "pad_token_id": _token_id("<|endoftext|>"),
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "Qwen2Tokenizer",
        "model_max_length": MAX_TOKENS,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }


def _token_id(token: str) -> int:
    """Special tokens come first in the vocabulary, in our order."""
    return SPECIAL_TOKENS.index(token)
