"""Where a model's files are, and how large its weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hotspan.core.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")
_DENSE: Final = ("llama", "mistral", "qwen2", "qwen3")
_DIMENSIONS: Final = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_FLOAT32: Final = ("float32", "float")


@dataclass(frozen=True, slots=True)
class Weights:
    """The size of a model's weights, and where it is known from. bytes: None if unknown."""

    bytes: int | None
    why: str


@dataclass(frozen=True, slots=True)
class _Index:
    """model.safetensors.index.json: the names of the files, and the bytes of all tensors; 0 if it does not say."""

    files: frozenset[str] = frozenset()
    total_bytes: int = 0


def is_model(path: Path) -> bool:
    """Whether a directory is a model, or the configuration of one."""
    return (path / "serving.properties").is_file() or (path / "config.json").is_file()


def is_remote(model: str) -> bool:
    """Whether a model must be fetched before the engine can load it."""
    return model.startswith("s3://")


def model_directory(model: str) -> Path:
    """The directory of a model given by its path, or by a hub id that was downloaded before.

    Raises: ConfigError if it is not on this machine, or is a file.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        raise ConfigError(f"{model} is a file: give the directory of the model")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError) as error:
        raise ConfigError(
            f"the model {model} is not on this machine: give its directory, or download it first: hf download {model}"
        ) from error


def weights_bytes(directory: Path) -> int:
    """Bytes of the weights in `directory`: the files of its index, else all *.safetensors, else all *.bin; 0 for none.

    A model that is there twice (shards, and one consolidated file) is counted once if it has an index. Where a file of
    the index is missing, the size that the index gives counts.
    Raises: OSError if the directory can't be read.
    """
    return _of_files(directory).bytes or 0


def find_weights(directory: Path, dtype: str = "auto") -> Weights:
    """The weights of a model of which perhaps only config.json is there. dtype: the engine's --dtype.

    Raises: OSError if the directory can't be read.
    """
    found = _of_files(directory)
    if found.bytes:
        return found
    try:
        parameters = dense_parameters(json.loads((directory / "config.json").read_text()))
    except (OSError, ValueError):
        parameters = None
    if parameters is not None:
        return Weights(parameters * (4 if dtype in _FLOAT32 else 2), "computed from config.json")
    return Weights(None, f"there are no weight files, no {_INDEX}, and config.json is not enough for this model")


def _of_files(directory: Path) -> Weights:
    """As `weights_bytes`, with the source."""
    index = _index(directory / _INDEX)
    listed = [directory / name for name in index.files]
    there = [path for path in listed if path.is_file()]
    files = (
        there
        if listed
        else list(directory.glob("*.safetensors"))
        or [path for path in directory.glob("*.bin") if not path.name.startswith(_NO_WEIGHTS)]
    )
    found = sum(path.stat().st_size for path in files if path.is_file())
    if len(there) < len(listed) and index.total_bytes > found:
        return Weights(index.total_bytes, f"total_size of {_INDEX}")
    return Weights(found, "size of the model's files")


def dense_parameters(config: Mapping[str, Any]) -> int | None:
    """The number of parameters of a dense Llama, Mistral, Qwen2 or Qwen3; None for others, and for quantised ones.

    Source: the modules of these models in transformers. tests/plan/test_weights.py has published numbers.
    """
    family = config.get("model_type")
    if family not in _DENSE or config.get("quantization_config"):
        return None
    try:
        hidden, layers, heads, inner, vocabulary = (int(config[key]) for key in _DIMENSIONS)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        size = int(config.get("head_dim") or hidden // heads)
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None
    q, kv = heads * size, kv_heads * size
    attention = 2 * hidden * (q + kv)
    if family == "qwen2":
        attention += q + 2 * kv
    elif config.get("attention_bias"):
        attention += q + 2 * kv + hidden
    if family == "qwen3":
        attention += 2 * size
    mlp = 3 * hidden * inner + (2 * inner + hidden if config.get("mlp_bias") else 0)
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return embeddings + layers * (attention + mlp + 2 * hidden) + hidden


def _index(path: Path) -> _Index:
    """What an index says; empty if there is none, or it is no index."""
    try:
        said = json.loads(path.read_text())
        files = {Path(name).name for name in said["weight_map"].values()}
        total = said.get("metadata", {}).get("total_size", 0)
        return _Index(frozenset(files), int(total))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return _Index()
