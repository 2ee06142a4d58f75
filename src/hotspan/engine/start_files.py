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

from hotspan.engine.fingerprint import State, decides_kv, state_of

if TYPE_CHECKING:
    from hotspan.engine.identity import Fields

logger = logging.getLogger(__name__)

_NOTE: Final = "hotspan_files"
"""The attribute of vLLM's configuration that has the files' states."""

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
    """Note the files that the workers are about to read. Mutates: the configuration."""
    try:
        setattr(vllm_config, _NOTE, _files(vllm_config))
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
    """The files that decide KV and are not those that were noted, by path; "?" if none were.

    A file of a hub's cache that came meanwhile was fetched by a worker, and is what its name says.
    Raises: OSError.
    """
    before: dict[Path, State] | None = getattr(vllm_config, _NOTE, None)
    if before is None:
        return ["?"]
    now = _files(vllm_config)
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
