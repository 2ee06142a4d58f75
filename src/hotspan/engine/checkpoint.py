"""The name of weights that were read from files while the engine ran, where the files alone tell what it has."""

import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from hotspan.core.clock import Clock
from hotspan.core.errors import ConfigError
from hotspan.core.namespace import namespace_digest
from hotspan.engine.fingerprint import FileDigests, State, model_digest, state_of

logger = logging.getLogger(__name__)

_SETTLED_S: Final = 2.0
"""A file that changed less long ago may change again under the same times."""

_MAX_HEADER_BYTES: Final = 1 << 26
_INDEX: Final = "model.safetensors.index.json"
_OTHERS: Final = (".bin", ".pt", ".pth", ".gguf")
_PARAMETERS: Final = ("weights_iterator", "weights_path", "is_checkpoint_format")
"""Of the model runner's `reload_weights`, in order."""


class _Seen(NamedTuple):
    """A directory as it was before it was read. tensors: digest of the names, types and shapes that it has."""

    directory: Path
    states: dict[Path, State]
    tensors: bytes | None


class Checkpoint:
    """What the engine was loaded from, and loads again.

    directory: of the start. fields: what the namespace was made of (engine/identity.py), "model" among it.

    The name is that of an engine which starts with the same files, so each must be sure:
      - the call reads a directory, in the checkpoint's format;
      - its tensors are those that the start had, by name, type and shape, so that none of before is left;
      - no file changed while it was read and digested, nor shortly before.
    """

    def __init__(
        self,
        directory: Path,
        fields: Mapping[str, str | int | bytes],
        digests: FileDigests,
        clock: Clock,
        *,
        full: bool,
        with_code: bool,
    ) -> None:
        self._fields = dict(fields)
        self._digests = digests
        self._clock = clock
        self._full = full
        self._with_code = with_code
        self._directory: Path | None = directory  # that a call without a path reads
        self._tensors = tensors_of(directory)

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], bytes | None] | None:
        """The workers are about to `reload_weights` with these arguments: what names them afterwards.

        None if files do not tell. What is returned reads all bytes that are not known, and may be called on any
        thread; it gives None if it is not sure.
        """
        directory = self._read_by(args, kwargs)
        try:
            seen = self._see(directory) if directory is not None else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("checkpoint_not_read directory=%s error=%s", directory, str(error))
            return None
        if seen is None or seen.tensors is None or seen.tensors != self._tensors:
            logger.warning("weights_have_no_digest directory=%s: not all tensors that the engine has", directory)
            return None
        newest_s = max(max(state[1], state[2]) for state in seen.states.values()) / 1e9
        if self._clock.unix() - newest_s <= _SETTLED_S:
            logger.warning("weights_have_no_digest directory=%s: a file changed within %g s", directory, _SETTLED_S)
            return None
        return lambda: self._name(seen)

    def reloaded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """The workers have reloaded: a call without a path reads what this one read."""
        given = _arguments(args, kwargs)
        if given is None:
            self._directory = None
        elif given["weights_iterator"] is None and given["weights_path"] is not None:
            path = Path(str(given["weights_path"]))
            self._directory = path if path.is_dir() else None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _read_by(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Path | None:
        """The directory that a call reads in the checkpoint's format; None if it reads none."""
        given = _arguments(args, kwargs)
        if given is None or given["weights_iterator"] is not None or given["is_checkpoint_format"] is not True:
            return None
        if given["weights_path"] is None:
            return self._directory
        path = Path(str(given["weights_path"]))
        return path if path.is_dir() else None

    @staticmethod
    def _see(directory: Path) -> _Seen:
        files = sorted(path for path in directory.iterdir() if path.is_file())
        return _Seen(directory, {path: state_of(path) for path in files}, tensors_of(directory))

    def _name(self, seen: _Seen) -> bytes | None:
        try:
            digest = model_digest(seen.directory, self._digests, full=self._full, with_code=self._with_code)
            is_same = self._see(seen.directory).states == seen.states
        except (OSError, ConfigError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("weights_have_no_digest directory=%s error=%s", seen.directory, str(error))
            return None
        if not is_same:
            logger.warning("weights_have_no_digest directory=%s: files changed while they were read", seen.directory)
            return None
        return namespace_digest(self._fields | {"model": digest})


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of `reload_weights` by name; None if they are not those that are known."""
    given: dict[str, Any] = {"weights_iterator": None, "weights_path": None, "is_checkpoint_format": True}
    if len(args) > len(_PARAMETERS) or kwargs.keys() - set(_PARAMETERS[len(args) :]):
        return None
    return given | dict(zip(_PARAMETERS, args, strict=False)) | dict(kwargs)


def tensors_of(directory: Path) -> bytes | None:
    """A digest of the names, types and shapes of a checkpoint's tensors; None if it has other files than safetensors,
    or an index that names others than its files have.

    Raises: OSError, ValueError and what wrong JSON leads to.
    """
    tensors: dict[str, Any] = {}
    for path in sorted(directory.iterdir()):
        if path.suffix in _OTHERS:
            return None
        if path.suffix == ".safetensors":
            found = _header(path)
            if tensors.keys() & found.keys():
                return None
            tensors |= found
    index = directory / _INDEX
    if index.exists() and set(json.loads(index.read_bytes())["weight_map"]) != tensors.keys():
        return None
    if not tensors:
        return None
    return hashlib.sha256(json.dumps(tensors, sort_keys=True).encode()).digest()


def _header(path: Path) -> dict[str, Any]:
    """Type and shape of each tensor in a safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path} has a header of {length} bytes")
        header = json.loads(file.read(length))
    return {name: [each["dtype"], each["shape"]] for name, each in header.items() if name != "__metadata__"}
