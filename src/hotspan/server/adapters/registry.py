"""The registered adapters, and the name that the engine has for each.

    register ──> checked, copied ──> hosted ── first invocation ──> loading ──> loaded
                                       │             ^                 │
                                       │             └── failed: the next invocation tries again
    update, delete ──> no longer found; what is in flight ends ──> unloaded, copy removed

Everything here runs on one event loop; files are touched in threads.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Coroutine
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from hotspan.core.errors import HotspanError
from hotspan.formatters import Formatters
from hotspan.http.errors import HttpError
from hotspan.server.adapters.check import AdapterLimits, check_adapter
from hotspan.server.adapters.loader import Adapter, AdapterLoader, key_of
from hotspan.server.adapters.snapshots import Snapshot, SnapshotStore
from hotspan.server.adapters.source import CONFIG, Sources, refuse_formatters
from hotspan.server.principal import SERVER, current_owner
from hotspan.server.turns import Turns

if TYPE_CHECKING:
    from hotspan.engine.adapters import EngineAdapters

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
_T = TypeVar("_T")
_P = ParamSpec("_P")

MAX_OF_A_TENANT, MAX_OF_ALL = 32, 1000
"""Adapters that clients may register, unless --max-client-adapters says otherwise: per tenant, or without keys all
clients together, who may be a platform with many tenants of its own. Each takes an open file and its size on disk."""

_MAX_CHANGES = 1024
"""Changes of adapters that may wait, half of them divided between the owners."""

_TENANTS_DIRECTORY = "{} is the directory of the tenant {!r}, whose files are not served to all: move it"
LORA_OFF = "LoRA is off: serve with --enable-lora (option.enable_lora=true)"


class EngineAdapter(NamedTuple):
    """An adapter as the engine names it in the names of KV."""

    name: str
    path: str


def _alone(
    change: "Callable[Concatenate[AdapterRegistry, _P], Coroutine[Any, Any, _T]]",
) -> "Callable[Concatenate[AdapterRegistry, _P], Coroutine[Any, Any, _T]]":
    """Make a change run alone and to its end, also if the caller is cancelled; changes wait in turns of owners."""

    @wraps(change)
    async def alone(self: "AdapterRegistry", /, *given: _P.args, **named: _P.kwargs) -> _T:
        async def work() -> _T:
            async with self._changes.turn(current_owner()):
                return await change(self, *given, **named)

        return await asyncio.shield(self._loader.start(work()))

    return alone


class AdapterRegistry:
    """The adapters of one server.

    An adapter belongs to the tenant that registered it, who alone sees, uses and changes it; or to the server, then
    every tenant may use it. A tenant's own comes before the server's of the same name.

    max_of_clients: adapters of each owner that clients may register.
    tenants:        how many there are besides the server.
    """

    def __init__(
        self,
        engine: "EngineAdapters",
        sources: Sources,
        snapshots: SnapshotStore,
        limits: AdapterLimits,
        formatters: Formatters | None = None,
        *,
        max_of_clients: int = MAX_OF_A_TENANT,
        tenants: int = 1,
    ) -> None:
        self._engine = engine
        self._loader = AdapterLoader(engine)
        self._sources = sources
        self._snapshots = snapshots
        self._limits = limits
        self._formatters = formatters
        self._max_of_clients = max_of_clients
        self._hosted: dict[str, Adapter] = {}
        self._refused: dict[str, str] = {}
        self._changes = Turns(1, tenants + 1, _MAX_CHANGES)

    def key_of(self, name: str, owner: str) -> str:
        """The registry's name for the adapter that a request of `owner` names; the name itself if there is none."""
        if _NAME.fullmatch(name) is None and not self._engine.has(name):
            raise self._unknown(name)
        own = key_of(name, owner)
        return own if own in self._hosted else name

    async def resolve(self, key: str) -> str:
        """The engine's model name for an adapter; the first to ask loads it, the others wait for that.

        key:     of `key_of`.
        Blocks:  while it loads; about a microsecond once it has.
        Raises:  HttpError, for all who wait; the next to ask tries again.
        """
        adapter = self._hosted.get(key)
        if adapter is None:
            if self._engine.has(key):
                return key
            raise self._unknown(key)
        if not adapter.is_loaded:
            await self._loader.load(adapter)
        return adapter.engine_name

    def describe(self, name: str, owner: str = SERVER) -> Adapter:
        """The adapter that `owner` has of this name. Raises: HttpError."""
        adapter = self._hosted.get(self.key_of(name, owner))
        if adapter is None:
            raise self._unknown(name)
        return adapter

    def seen_by(self, owner: str | None) -> list[Adapter]:
        """The adapters that `owner` may use, by name; of two of one name its own. None: all adapters of all owners."""
        found = {adapter.key: adapter for adapter in self._hosted.values() if not adapter.owner or owner is None}
        if owner:
            found |= {adapter.name: adapter for adapter in self._hosted.values() if adapter.owner == owner}
        return [found[key] for key in sorted(found)]

    def engine_adapter(self, name: str, owner: str = SERVER) -> EngineAdapter | None:
        """What the names of an adapter's KV are made of, loaded or not; None if there is no such adapter."""
        adapter = self._hosted.get(key_of(name, owner)) or self._hosted.get(name)
        return None if adapter is None else EngineAdapter(adapter.engine_name, str(adapter.snapshot.path))

    async def autoload(self, directory: Path, *, tenants: Collection[str] = ()) -> None:
        """Register every `directory`/NAME, unloaded; one that is refused is logged, and its callers are told why.

        tenants: their directories, which they may be able to write to, hold no adapters of the server's.
        """
        for path in sorted(directory.glob("[!.]*")):
            if not path.is_dir() or (path.name in tenants and not (path / CONFIG).exists()):
                continue
            try:
                if path.name in tenants:
                    raise HttpError(403, _TENANTS_DIRECTORY.format(path, path.name))
                await self.register(path.name, str(path), preload=False)
            except HttpError as error:
                self._refused[path.name] = str(error)
                logger.warning("adapter_refused name=%s: %s", path.name, error)

    async def close(self) -> None:
        """Let go of all copies; the engine must have ended."""
        await self._loader.close()
        for adapter in self._hosted.values():
            await asyncio.to_thread(adapter.snapshot.close)
        self._hosted.clear()

    # -- changes, one at a time ------------------------------------------------------------------------------------

    @_alone
    async def register(
        self,
        name: str,
        src: str,
        *,
        preload: bool = True,
        pin: bool = False,
        owner: str = SERVER,
        is_clients: bool = False,
    ) -> Adapter:
        """Add an adapter; `preload` loads it before this returns, and it is registered only if that works.

        is_clients: a client asks for it, and not the administrator.
        Raises: HttpError; nothing has changed then.
        """
        if is_clients:
            self._check_count(owner)
        self._check_name(name, owner)
        self._check_pin(name, preload=preload, pin=pin, owner=owner)
        adapter = await self._take(name, src, preload=preload, pin=pin, owner=owner)
        adapter.is_clients = is_clients
        await self._install(adapter, None)
        logger.info("adapter_registered name=%s digest=%s", name, adapter.digest)
        return adapter

    @_alone
    async def update(
        self,
        name: str,
        *,
        src: str | None = None,
        preload: bool | None = None,
        pin: bool | None = None,
        owner: str = SERVER,
    ) -> Adapter:
        """Read an adapter's files again, or other files; requests in flight keep the old ones.

        What is None stays as it was. Raises: HttpError; nothing has changed then, but for a pin that got no slot again
        in time.
        """
        old = self._owned(name, owner)
        preload = old.preload if preload is None else preload
        pin = old.pin if pin is None else pin
        self._check_pin(name, preload=preload, pin=pin, owner=owner)
        new = await self._take(name, old.src if src is None else src, preload=preload, pin=pin, owner=owner)
        new.is_clients = old.is_clients
        if new.engine_name == old.engine_name:
            return await self._adjust(old, new)
        await self._install(new, old)
        logger.info("adapter_updated name=%s digest=%s was=%s", name, new.digest, old.digest)
        return new

    @_alone
    async def delete(self, name: str, owner: str = SERVER) -> None:
        """Remove an adapter once its requests in flight have ended. Raises: HttpError."""
        adapter = self._owned(name, owner)
        del self._hosted[adapter.key]
        await self._loader.unpin(adapter)
        await self._restore_formatter(adapter.key, None)
        self._loader.start(self._loader.retire(adapter))
        logger.info("adapter_deleted name=%s digest=%s", name, adapter.digest)

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _install(self, new: Adapter, old: Adapter | None) -> None:
        """Put an adapter in the place of another one, or of none. Raises: HttpError, as `update`."""
        loader = self._loader
        try:
            if new.preload:
                await loader.load(new, status=400)
            await self._format(new)
            if old is not None:
                await loader.unpin(old)
            if new.pin:
                await loader.pin(new)
        except HttpError:
            await self._restore_formatter(new.key, old)
            loader.start(loader.retire(new))
            raise
        self._hosted[new.key] = new
        self._refused.pop(new.key, None)
        if old is not None:
            loader.start(loader.retire(old))

    async def _adjust(self, adapter: Adapter, asked: Adapter) -> Adapter:
        """Update an adapter whose files are unchanged: it stays loaded, or goes on loading."""
        await asyncio.to_thread(asked.snapshot.close)
        try:
            if asked.preload:
                await self._loader.load(adapter, status=400)
            await self._format(asked)
            if asked.pin and not adapter.pin:
                await self._loader.pin(adapter)
        except HttpError:
            await self._restore_formatter(adapter.key, adapter)
            raise
        if not asked.pin:
            await self._loader.unpin(adapter)
        adapter.src, adapter.directory = asked.src, asked.directory
        adapter.preload, adapter.pin = asked.preload, asked.pin
        return adapter

    async def _take(self, name: str, src: str, *, preload: bool, pin: bool, owner: str) -> Adapter:
        """Check an adapter's files and copy them."""

        def take() -> tuple[Path, Snapshot]:
            sources = self._sources.of(owner)
            directory = sources.directory(src)
            if owner:
                refuse_formatters(directory)
            return directory, self._snapshots.take(sources, directory, lambda copy: check_adapter(copy, self._limits))

        directory, snapshot = await asyncio.to_thread(take)
        engine_name = self._engine.name_of(name, snapshot.digest, owner)
        return Adapter(name, owner, src, preload, pin, directory, snapshot, engine_name)

    def _check_name(self, name: str, owner: str) -> None:
        """Raise HttpError for a name that a new adapter can't have."""
        if not _NAME.fullmatch(name):
            raise HttpError(
                400,
                f"name is {name!r:.140}: give letters, digits and any of . _ : + -, at most 128, of which the first is "
                "a letter or a digit",
            )
        if key_of(name, owner) in self._hosted:
            raise HttpError(409, f"there is an adapter {name!r} already: update it, or delete it first")
        if self._engine.has(name):
            raise HttpError(409, f"{name!r} is what the server calls a model of its own: give another name")

    def _check_pin(self, name: str, *, preload: bool, pin: bool, owner: str) -> None:
        if not pin:
            return
        if owner:
            raise HttpError(403, "pin takes a slot from every tenant: only the administrator's adapters can have it")
        if not preload:
            raise HttpError(400, "pin keeps an adapter loaded, and preload=false does not load it: leave one out")
        pinned = sum(adapter.pin for adapter in self._hosted.values() if adapter.key != name)
        if pinned + 1 >= self._engine.slots:
            raise HttpError(
                507,
                f"no slot is free to pin {name!r} in: {pinned} of {self._engine.slots} (--max-loras) are pinned, and "
                "one stays for the other adapters; unpin one (update with pin=false), or serve with more",
            )

    def _check_count(self, owner: str) -> None:
        count = sum(adapter.is_clients and adapter.owner == owner for adapter in self._hosted.values())
        if count >= self._max_of_clients:
            raise HttpError(
                400,
                f"{count} adapters are registered, and {'a tenant' if owner else 'clients'} may have "
                f"{self._max_of_clients} (--max-client-adapters): delete one first",
            )

    def _owned(self, name: str, owner: str) -> Adapter:
        """An adapter that `owner` may change. Raises: HttpError."""
        adapter = self.describe(name, owner)
        if adapter.owner != owner:
            raise HttpError(403, f"adapter {name!r} is the administrator's: register one of your own")
        return adapter

    def _unknown(self, name: str) -> HttpError:
        if reason := self._refused.get(name):
            return HttpError(404, f"adapter {name!r} was refused at the start: {reason}; then register it")
        return HttpError(
            404, f"there is no adapter {name!r:.140}: register it with POST /adapters, or see GET /adapters"
        )

    async def _format(self, adapter: Adapter) -> None:
        """Give an adapter its formatters, in place of those it had. A tenant's has none: see `refuse_formatters`."""
        if self._formatters is None or adapter.owner:
            return
        try:
            await asyncio.to_thread(self._formatters.add, adapter.key, adapter.directory)
        except HotspanError as error:
            raise HttpError(400, f"adapter {adapter.name!r}: {error}") from error

    async def _restore_formatter(self, key: str, adapter: Adapter | None) -> None:
        """Give an adapter its own formatters again; without an adapter, its key has none."""
        if adapter is None:
            if self._formatters is not None:
                await asyncio.to_thread(self._formatters.remove, key)
            return
        try:
            await self._format(adapter)
        except HttpError as error:
            logger.warning("adapter_formatter_lost name=%s: %s", adapter.name, error)
