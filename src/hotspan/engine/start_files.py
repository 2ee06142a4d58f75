"""Whether the workers read the files that the namespace is made of: they may be replaced while an engine starts.

Executor.__init__    `note_files`: the state of each file of the model, its draft and its scales
(the workers read the weights, for minutes)
open_cache           the digests of the same files, then `changed_files`: which of them are others than before
"""

import logging
import secrets
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from weakref import finalize

import psutil

from hotspan.engine.fingerprint import State, decides_kv, state_of

if TYPE_CHECKING:
    from hotspan.engine.identity import Fields

logger = logging.getLogger(__name__)

_noted: "dict[int, dict[Path, State]]" = {}
"""The files' states by the id of vLLM's configuration, which can't be a key and takes no more attributes."""

_BLOBS: Final = "blobs"
"""In a hub's cache the directory of files that are named by their content, and never written again."""


def watch_starts() -> None:
    """Have each engine core of this process note its files before its executor starts workers.

    Mutates: vLLM's class, once. To be called before an engine starts: a plugin's `register` is.
    """
    from vllm.v1.executor.abstract import Executor

    start = Executor.__init__
    if hasattr(start, "notes_files"):
        return

    @wraps(start)
    def __init__(executor: Any, vllm_config: Any, *given: Any, **named: Any) -> None:
        if vllm_config.kv_transfer_config is not None:
            note_files(vllm_config)
        start(executor, vllm_config, *given, **named)

    __init__.notes_files = True  # type: ignore[attr-defined]
    Executor.__init__ = __init__


def note_files(vllm_config: Any) -> None:
    """Note the files that the workers are about to read, for as long as the configuration lives."""
    try:
        _noted[id(vllm_config)] = _files(vllm_config)
        finalize(vllm_config, _noted.pop, id(vllm_config), None)
    except Exception as error:  # the start goes on, and its KV has no lasting name
        logger.warning("files_not_noted error=%s", str(error))


def of_same_files(vllm_config: Any, fields: "Fields") -> "Fields":
    """What the namespace is made of, once the digests are made: no other process has the same if files have changed
    since the workers began to read them. Raises: OSError.
    """
    changed = changed_files(vllm_config)
    if not changed:
        return fields
    logger.warning(
        "weights_have_no_digest files=%s: they changed while the engine started, and it may have the former ones; "
        "what it caches is not found after a restart or by other replicas: start it again",
        ", ".join(changed[:3]),
    )
    return fields | {"unknown_weights": secrets.token_bytes(16)}


def changed_files(vllm_config: Any) -> list[str]:
    """The files that decide KV and are not those that were noted, by path.

    Where none were, in a vLLM that was told to load other plugins alone, those that changed after this process began.
    A file of a hub's cache that came meanwhile was fetched by a worker, and is what its name says.
    Raises: OSError.
    """
    before, now = _noted.get(id(vllm_config)), _files(vllm_config)
    if before is None:
        began_ns = psutil.Process().create_time() * 1e9
        before = {path: state for path, state in now.items() if max(state[1], state[2]) < began_ns}
    changed = [path for path in before.keys() | now.keys() if before.get(path) != now.get(path)]
    return sorted(str(path) for path in changed if path in before or not _is_fetched(path))


def _is_fetched(path: Path) -> bool:
    return path.is_symlink() and path.resolve().parent.name == _BLOBS


def _files(vllm_config: Any) -> dict[Path, State]:
    """The files whose bytes decide KV, of the model, the draft model and the media encoder's scales."""
    from hotspan.engine.identity import draft_config, model_directory, scales_path

    found: dict[Path, State] = {}
    for model in filter(None, (vllm_config.model_config, draft_config(vllm_config))):
        try:
            files = list(model_directory(model).iterdir())
        except FileNotFoundError:  # of a hub's model that the workers fetch
            continue
        found |= {path: state_of(path) for path in files if decides_kv(path, with_code=model.trust_remote_code)}
    scales = scales_path(vllm_config)
    if scales is not None and scales.is_file():
        found[scales] = state_of(scales)
    return found
