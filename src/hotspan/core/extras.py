"""Packages that the base install leaves out, and the extra of hotspan that brings each."""

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from hotspan.core.errors import ConfigError

_ENGINE: Final = "pip install 'hotspan[cpu]', or 'hotspan[gpu]' on a machine with CUDA"
_BENCH: Final = "pip install 'hotspan[bench]'"

EXTRAS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "vllm": _ENGINE,
        "torch": _ENGINE,
        "transformers": _ENGINE,
        "fastapi": _ENGINE,
        "starlette": _ENGINE,
        "jsonschema": _ENGINE,
        "safetensors": _ENGINE,
        "plotly": _BENCH,
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
        part = "the engine" if EXTRAS[error.name] is _ENGINE else "reports"
        raise ConfigError(
            f"this command needs the packages of {part}, and {error.name} is not installed: {EXTRAS[error.name]}"
        ) from error
