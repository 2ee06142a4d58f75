"""Where a model's files are, and how large its weights."""

import json
from pathlib import Path

from hotspan.core.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state")


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

    A model that is there twice (shards, and one consolidated file) is counted once if it has an index.
    Raises: OSError if the directory can't be read.
    """
    listed = _listed(directory / _INDEX)
    if listed:
        return sum(path.stat().st_size for name in listed if (path := directory / name).is_file())
    files = list(directory.glob("*.safetensors")) or [
        path for path in directory.glob("*.bin") if not path.name.startswith(_NO_WEIGHTS)
    ]
    return sum(path.stat().st_size for path in files if path.is_file())


def _listed(index: Path) -> set[str]:
    """The files that an index names; empty if there is none, or it is no index."""
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        return {Path(name).name for name in weight_map.values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
