"""The adapters of one server, from its settings: those of its directory, and where their copies are."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hotspan.config.server_settings import ServerSettings
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.core.held import sweep
from hotspan.core.types import GIB
from hotspan.formatters import Formatters
from hotspan.plan.weights import model_directory, weights_bytes
from hotspan.server.adapters.check import AdapterLimits, model_shapes
from hotspan.server.adapters.registry import MAX_OF_A_TENANT, MAX_OF_ALL, AdapterRegistry
from hotspan.server.adapters.snapshots import SnapshotStore
from hotspan.server.adapters.source import Sources
from hotspan.server.options import ServeOptions
from hotspan.server.principal import current_owner

if TYPE_CHECKING:
    from hotspan.engine.launch import Engine


async def open_adapters(
    engine: "Engine", options: ServeOptions, formatters: Formatters | None
) -> AdapterRegistry | None:
    """The adapters of a server with LoRA: those in its directory, and what comes over HTTP."""
    adapters = engine.adapters()
    if adapters is None:
        return None
    directory, own = options.server.adapters or Path(options.model) / "adapters", options.server.client_adapters
    registry = AdapterRegistry(
        adapters,
        Sources([directory] if own is None else [directory, own]),
        SnapshotStore(copies_directory(options.server), _max_adapter_bytes(options.model)),
        AdapterLimits(adapters.max_rank, model_shapes(Path(options.model))),
        formatters,
        max_of_clients=options.server.max_client_adapters or (MAX_OF_A_TENANT if options.has_keys else MAX_OF_ALL),
        tenants=max(1, len(options.tenants.names)),
    )
    adapters.publish(lambda: [adapter.name for adapter in registry.seen_by(current_owner())])
    await registry.autoload(directory, tenants=options.tenants.names)
    return registry


def _max_adapter_bytes(model: str) -> int:
    """The maximum size of an adapter, which the engine reads as a whole: the model's size, at least 1 GiB."""
    try:
        return max(GIB, weights_bytes(model_directory(model)))
    except (ConfigError, OSError):  # it is not here
        return 16 * GIB


def copies_directory(server: ServerSettings) -> Path:
    """The directory of adapters' copies. Its path is part of the names of their KV."""
    return (server.adapter_copies or Path(f"/tmp/hotspan-adapters-{os.geteuid()}")).absolute()


@contextlib.contextmanager
def copies_swept(server: ServerSettings, aftermath: Aftermath) -> Iterator[None]:
    """Remove unused copies at the end, also after a kill, and the directory unless the user named it."""
    root, is_whole = copies_directory(server), server.adapter_copies is None
    aftermath.sweep(root, is_whole=is_whole)
    try:
        yield
    finally:
        sweep(root, is_whole=is_whole)
