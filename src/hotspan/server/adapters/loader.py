"""One adapter of one content, and its way into the engine and out of it."""

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hotspan.core.errors import EngineError
from hotspan.http.errors import MODEL, HttpError
from hotspan.server.adapters.snapshots import Snapshot

if TYPE_CHECKING:
    from hotspan.engine.adapters import EngineAdapters

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Adapter:
    """One adapter of one content.

    owner:       the tenant that it belongs to, or SERVER: all tenants may use it.
    engine_name: the engine's name for it.
    is_clients:  a client registered it, and not the administrator.
    """

    name: str
    owner: str
    src: str
    preload: bool
    pin: bool
    directory: Path
    snapshot: Snapshot
    engine_name: str
    is_clients: bool = False
    is_loaded: bool = False
    loading: "asyncio.Task[HttpError | None] | None" = None

    @property
    def digest(self) -> str:
        """64 hex digits over its files."""
        return self.snapshot.digest

    @property
    def key(self) -> str:
        return key_of(self.name, self.owner)


def key_of(name: str, owner: str) -> str:
    """The registry's name for an adapter. Names have no @, so that nobody can name another owner's."""
    return f"{name}@{owner}" if owner else name


class AdapterLoader:
    """Loads, pins and unloads adapters, each once for all who wait for it."""

    def __init__(self, engine: "EngineAdapters") -> None:
        self._engine = engine
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        """A task that `close` cancels."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all tasks."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def load(self, adapter: Adapter, status: int = 500) -> None:
        """Load an adapter unless it is, once for all who want it. Raises: HttpError, each its own."""
        if adapter.is_loaded:
            return
        if adapter.loading is None:
            adapter.loading = self.start(self._load_once(adapter, status))
        error = await asyncio.shield(adapter.loading)
        if error is not None:
            raise HttpError(error.status, str(error))

    async def _load_once(self, adapter: Adapter, status: int) -> HttpError | None:
        try:
            await self._engine.load(adapter.engine_name, adapter.snapshot.path)
        except EngineError as error:
            logger.warning("adapter_load_failed name=%s: %s", adapter.name, error)
            if self._engine.is_dead:
                return HttpError(503, f"adapter {adapter.name!r} can't be loaded, the engine has stopped: {error}")
            return HttpError(
                status,
                f"adapter {adapter.name!r} can't be loaded: {error}; give other files with an update, or try again",
            )
        finally:
            adapter.loading = None
        adapter.is_loaded = True
        return None

    async def pin(self, adapter: Adapter) -> None:
        """Keep an adapter loaded. Raises: HttpError 503."""
        try:
            await self._engine.pin(adapter.engine_name)
        except EngineError as error:
            raise HttpError(503, f"adapter {adapter.name!r} can't be pinned: {error}", about=MODEL) from error

    async def unpin(self, adapter: Adapter) -> None:
        """Free an adapter's slot now, not when its requests have ended, so that another adapter can be pinned."""
        if adapter.pin:
            adapter.pin = False
            await self._engine.unpin(adapter.engine_name)

    async def retire(self, adapter: Adapter) -> None:
        """Let an adapter's requests end, then unload it and remove its copy."""
        try:
            if adapter.loading is not None:
                await adapter.loading
            if adapter.is_loaded:
                await self._engine.unload(adapter.engine_name)
        finally:
            await asyncio.to_thread(adapter.snapshot.close)
