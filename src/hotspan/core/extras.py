"""Packages that the base install leaves out, and the extra of hotspan that brings each."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from hotspan.core.errors import ConfigError

_ENGINE: Final = "pip install 'hotspan[cpu]', or 'hotspan[gpu]' on a machine with CUDA"
_BENCH: Final = "pip install 'hotspan[bench]'"
_TOKENS: Final = "pip install 'hotspan[tokens]'"
_PARTS: Final = {_ENGINE: "the engine", _BENCH: "reports", _TOKENS: "tokenizers"}

EXTRAS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "vllm": _ENGINE,
        "torch": _ENGINE,
        "transformers": _ENGINE,
        "fastapi": _ENGINE,
        "starlette": _ENGINE,
        "jsonschema": _ENGINE,
        "obstore": _ENGINE,
        "safetensors": _ENGINE,
        "zstandard": _ENGINE,
        "plotly": _BENCH,
        "tokenizers": _TOKENS,
    }
)
"""For each package, as it is imported, the command that installs it."""


@contextlib.contextmanager
def naming_extra() -> Iterator[None]:
    """Turn a missing package of an extra into a ConfigError that names the command to install it.

    A package that is installed and lacks a module of its own is a defect, and stays a ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name not in EXTRAS:
            raise
        how = EXTRAS[error.name]
        raise ConfigError(
            f"this command needs the packages of {_PARTS[how]}, and {error.name} is not installed: {how}"
        ) from error
