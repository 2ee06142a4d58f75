"""Adapters named on the command line (--lora-modules), served from private copies like all others."""

import contextlib
import logging
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.server.adapters.errors import AdapterError
from hotspan.server.adapters.snapshots import SnapshotStore
from hotspan.server.adapters.source import CONFIG, WEIGHTS, Sources

logger = logging.getLogger(__name__)

_ANYWHERE = Sources([Path("/")])
"""Who starts the server names the files: they may be links, as in the hub's cache."""


@contextlib.contextmanager
def pinned_adapters(arguments: Namespace, store: Path) -> Iterator[None]:
    """Let the engine load --lora-modules from copies of their files as they are now, kept until the end.

    The engine reads an adapter's files again whenever it has evicted it: files that were overwritten meanwhile would
    answer under the KV of the old ones. What is no local directory of safetensors stays where it is; its KV is not
    cached any more once its files change (engine/fingerprint.py).

    Mutates: the paths in `arguments.lora_modules`.
    Blocks:  for copying the files.
    Raises:  ConfigError if they can't be copied to `store`.
    """
    with contextlib.ExitStack() as held:
        copies: SnapshotStore | None = None
        for adapter in getattr(arguments, "lora_modules", None) or ():
            directory = Path(adapter.path).expanduser()
            if not all((directory / name).is_file() for name in (CONFIG, WEIGHTS)):
                continue
            copies = copies or SnapshotStore(store)
            try:
                snapshot = copies.take(_ANYWHERE, directory.resolve(), lambda path: None)
            except AdapterError as error:
                raise ConfigError(f"--lora-modules {adapter.name}: {error}") from error
            held.callback(snapshot.close)
            logger.info("adapter_copied name=%s digest=%s", adapter.name, snapshot.digest[:12])
            adapter.path = str(snapshot.path)
        yield
