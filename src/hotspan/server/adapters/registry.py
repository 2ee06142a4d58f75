"""Which adapters there are, and under which name the engine has each.

    register ──> checked, copied ──> hosted ── first invocation ──> loading ──> loaded
                                       │             ^                 │
                                       │             └── failed: the next invocation tries again
    update, delete ──> no longer found; what is in flight ends ──> unloaded, copy removed

Everything here runs on one event loop; files are touched in threads.
"""

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Coroutine, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hotspan.core.errors import EngineError, HotspanError
from hotspan.server.adapters.base import Adapter, AdapterEngine, AdapterFormatters, EngineAdapter, Page
from hotspan.server.adapters.check import AdapterLimits, check_adapter
from hotspan.server.adapters.errors import AdapterError
from hotspan.server.adapters.snapshots import Snapshot, SnapshotStore
from hotspan.server.adapters.source import CONFIG, Sources, refuse_formatters
from hotspan.server.principal import SERVER

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+-]{0,127}")
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class _Hosted:
    """One adapter of one content.

    owner:      the tenant whose it is, or SERVER.
    is_clients: a client registered it, and not the administrator.
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
    loading: "asyncio.Task[AdapterError | None] | None" = None

    def view(self) -> Adapter:
        return Adapter(self.name, self.owner, self.src, self.preload, self.pin, self.is_loaded, self.snapshot.digest)

    @property
    def key(self) -> str:
        return _key(self.name, self.owner)


def _key(name: str, owner: str) -> str:
    """What the registry calls an adapter. Names have no @, so that nobody can name another one's."""
    return f"{name}@{owner}" if owner else name


MAX_OF_A_TENANT, MAX_OF_ALL = 32, 1000
"""Adapters that clients may register, unless --max-client-adapters says otherwise: a tenant, or without keys everyone,
who may be a platform with many tenants of its own. Each takes an open file, and its size on the disk."""

_TENANTS_DIRECTORY = "{} is the directory of the tenant {!r}, whose files are not served to all: move it"
LORA_OFF = "LoRA is off: serve with --enable-lora (option.enable_lora=true)"


class AdapterRegistry:
    """The adapters of one server.

    An adapter belongs to the tenant that registered it, who alone sees, uses and changes it; or to the server, then
    every tenant may use it. A tenant's own comes before the server's of the same name.

    max_of_clients: adapters of each owner that clients may register.
    """

    def __init__(
        self,
        engine: AdapterEngine,
        sources: Sources,
        snapshots: SnapshotStore,
        limits: AdapterLimits,
        formatters: AdapterFormatters | None = None,
        *,
        max_of_clients: int = MAX_OF_A_TENANT,
    ) -> None:
        self._engine = engine
        self._sources = sources
        self._snapshots = snapshots
        self._limits = limits
        self._formatters = formatters
        self._max_of_clients = max_of_clients
        self._hosted: dict[str, _Hosted] = {}
        self._refused: dict[str, str] = {}
        self._changes = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()

    def key_of(self, name: str, owner: str) -> str:
        """What the registry calls the adapter that a request of `owner` names; the name itself if it has none."""
        if _NAME.fullmatch(name) is None and not self._engine.has(name):
            raise self._unknown(name)
        own = _key(name, owner)
        return own if own in self._hosted else name

    async def resolve(self, key: str) -> str:
        """The engine's model name for an adapter; the first to ask loads it, the others wait for that.

        key:     of `key_of`.
        Blocks:  while it loads; about a microsecond once it has.
        Raises:  AdapterError, for all who wait; the next to ask tries again.
        """
        hosted = self._hosted.get(key)
        if hosted is None:
            if self._engine.has(key):
                return key
            raise self._unknown(key)
        if not hosted.is_loaded:
            await self._load(hosted)
        return hosted.engine_name

    def describe(self, name: str, owner: str = SERVER) -> Adapter:
        """The adapter that `owner` has of this name. Raises: AdapterError."""
        hosted = self._hosted.get(self.key_of(name, owner))
        if hosted is None:
            raise self._unknown(name)
        return hosted.view()

    def page(self, limit: int = 100, next_page_token: int = 0, *, owner: str | None = SERVER) -> Page:
        """Adapters in the order of their names, from the `next_page_token` that the page before gave.

        owner: who sees its own and the server's; None sees all.
        """
        end = next_page_token + limit
        found = self._seen_by(owner)
        views = tuple(hosted.view() for hosted in found[next_page_token:end])
        return Page(views, end if end < len(found) else None)

    def engine_adapter(self, name: str, owner: str = SERVER) -> EngineAdapter | None:
        """What the names of an adapter's KV are made of, loaded or not; None if there is no such adapter."""
        hosted = self._hosted.get(_key(name, owner)) or self._hosted.get(name)
        return None if hosted is None else EngineAdapter(hosted.engine_name, str(hosted.snapshot.path))

    def names(self, owner: str = SERVER) -> Iterable[str]:
        """The adapters that `owner` can use, by name."""
        return [hosted.name for hosted in self._seen_by(owner)]

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
        Raises: AdapterError; nothing has changed then.
        """

        async def register() -> Adapter:
            if is_clients:
                self._check_count(owner)
            hosted = await self._register(name, src, preload=preload, pin=pin, owner=owner)
            hosted.is_clients = is_clients
            return hosted.view()

        return await self._alone(register)

    async def update(
        self,
        name: str,
        *,
        src: str | None = None,
        preload: bool | None = None,
        pin: bool | None = None,
        owner: str = SERVER,
    ) -> Adapter:
        """Read an adapter's files again, or others; requests in flight end with what they began with.

        What is None stays as it was. Raises: AdapterError; nothing has changed then, but for a pin that got no slot
        again in time.
        """
        return await self._alone(lambda: self._update(name, src=src, preload=preload, pin=pin, owner=owner))

    async def delete(self, name: str, owner: str = SERVER) -> None:
        """Take an adapter away; its requests in flight end. Raises: AdapterError."""
        await self._alone(lambda: self._delete(name, owner))

    async def autoload(self, directory: Path, *, preload: bool = False, tenants: Collection[str] = ()) -> None:
        """Register every `directory`/NAME; one that is refused is logged, and its callers are told why.

        tenants: their directories, which they may be able to write to, hold no adapters of the server's.
        """
        for path in sorted(directory.glob("[!.]*")):
            if not path.is_dir() or (path.name in tenants and not (path / CONFIG).exists()):
                continue
            try:
                if path.name in tenants:
                    raise AdapterError(403, _TENANTS_DIRECTORY.format(path, path.name))
                await self.register(path.name, str(path), preload=preload)
            except AdapterError as error:
                self._refused[path.name] = str(error)
                logger.warning("adapter_refused name=%s: %s", path.name, error)

    async def close(self) -> None:
        """Let go of all copies; the engine must have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for hosted in self._hosted.values():
            await asyncio.to_thread(hosted.snapshot.close)
        self._hosted.clear()

    # -- changes, one at a time ------------------------------------------------------------------------------------

    async def _alone(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Carry out a change to its end, also if who asked for it goes away."""

        async def change() -> _T:
            async with self._changes:
                return await work()

        return await asyncio.shield(self._start(change()))

    async def _register(self, name: str, src: str, *, preload: bool, pin: bool, owner: str) -> _Hosted:
        if not _NAME.fullmatch(name):
            raise AdapterError(
                400,
                f"name is {name!r:.140}: give letters, digits and any of . _ : + -, at most 128, of which the first is "
                "a letter or a digit",
            )
        if _key(name, owner) in self._hosted:
            raise AdapterError(409, f"there is an adapter {name!r} already: update it, or delete it first")
        if self._engine.has(name):
            raise AdapterError(409, f"{name!r} is what the server calls a model of its own: give another name")
        self._check_pin(name, preload=preload, pin=pin, owner=owner)
        hosted = await self._take(name, src, preload=preload, pin=pin, owner=owner)
        try:
            if preload:
                await self._load(hosted, status=400)
            await self._format(hosted)
            if pin:
                await self._pin(hosted)
        except AdapterError:
            await self._drop_formatter(hosted.key)
            self._start(self._retire(hosted))
            raise
        self._hosted[hosted.key] = hosted
        self._refused.pop(hosted.key, None)
        logger.info("adapter_registered name=%s digest=%s", name, hosted.snapshot.digest)
        return hosted

    async def _update(
        self, name: str, *, src: str | None, preload: bool | None, pin: bool | None, owner: str
    ) -> Adapter:
        old = self._owned(name, owner)
        preload = old.preload if preload is None else preload
        pin = old.pin if pin is None else pin
        self._check_pin(name, preload=preload, pin=pin, owner=owner)
        new = await self._take(name, old.src if src is None else src, preload=preload, pin=pin, owner=owner)
        if new.engine_name == old.engine_name:
            return await self._adjust(old, new)
        try:
            if preload:
                await self._load(new, status=400)
            await self._format(new)
            await self._unpin(old)
            if pin:
                await self._pin(new)
        except AdapterError:
            await self._restore_formatter(old)
            self._start(self._retire(new))
            raise
        new.is_clients = old.is_clients
        self._hosted[new.key] = new
        self._start(self._retire(old))
        logger.info("adapter_updated name=%s digest=%s was=%s", name, new.snapshot.digest, old.snapshot.digest)
        return new.view()

    async def _adjust(self, hosted: _Hosted, asked: _Hosted) -> Adapter:
        """Update an adapter whose files hold what they held: what is loaded, or loading, goes on."""
        await asyncio.to_thread(asked.snapshot.close)
        try:
            if asked.preload:
                await self._load(hosted, status=400)
            await self._format(asked)
            if asked.pin and not hosted.pin:
                await self._pin(hosted)
        except AdapterError:
            await self._restore_formatter(hosted)
            raise
        if not asked.pin:
            await self._unpin(hosted)
        hosted.src, hosted.directory, hosted.preload, hosted.pin = asked.src, asked.directory, asked.preload, asked.pin
        return hosted.view()

    async def _delete(self, name: str, owner: str) -> None:
        hosted = self._owned(name, owner)
        del self._hosted[hosted.key]
        await self._unpin(hosted)
        await self._drop_formatter(hosted.key)
        self._start(self._retire(hosted))
        logger.info("adapter_deleted name=%s digest=%s", name, hosted.snapshot.digest)

    # -- inside ----------------------------------------------------------------------------------------------------

    async def _take(self, name: str, src: str, *, preload: bool, pin: bool, owner: str) -> _Hosted:
        """Check an adapter's files and copy them."""

        def take() -> tuple[Path, Snapshot]:
            sources = self._sources.of(owner)
            directory = sources.directory(src)
            if owner:
                refuse_formatters(directory)
            return directory, self._snapshots.take(sources, directory, lambda copy: check_adapter(copy, self._limits))

        directory, snapshot = await asyncio.to_thread(take)
        engine_name = self._engine.name_of(name, snapshot.digest, owner)
        return _Hosted(name, owner, src, preload, pin, directory, snapshot, engine_name)

    async def _load(self, hosted: _Hosted, status: int = 500) -> None:
        """Load an adapter unless it is, once for all who want it. Raises: AdapterError, each its own."""
        if hosted.is_loaded:
            return
        if hosted.loading is None:
            hosted.loading = self._start(self._load_once(hosted, status))
        error = await asyncio.shield(hosted.loading)
        if error is not None:
            raise AdapterError(error.status, str(error))

    async def _load_once(self, hosted: _Hosted, status: int) -> AdapterError | None:
        try:
            await self._engine.load(hosted.engine_name, hosted.snapshot.path)
        except EngineError as error:
            logger.warning("adapter_load_failed name=%s: %s", hosted.name, error)
            if self._engine.is_dead:
                return AdapterError(503, f"adapter {hosted.name!r} can't be loaded, the engine has stopped: {error}")
            return AdapterError(
                status,
                f"adapter {hosted.name!r} can't be loaded: {error}; give other files with an update, or try again",
            )
        finally:
            hosted.loading = None
        hosted.is_loaded = True
        return None

    async def _pin(self, hosted: _Hosted) -> None:
        try:
            await self._engine.pin(hosted.engine_name)
        except EngineError as error:
            raise AdapterError(503, f"adapter {hosted.name!r} can't be pinned: {error}") from error

    async def _unpin(self, hosted: _Hosted) -> None:
        """Give an adapter's slot to all, now and not once its requests have ended, so that another can be pinned."""
        if hosted.pin:
            hosted.pin = False
            await self._engine.unpin(hosted.engine_name)

    async def _retire(self, hosted: _Hosted) -> None:
        """Let an adapter's requests end, then unload it and remove its copy."""
        try:
            if hosted.loading is not None:
                await hosted.loading
            if hosted.is_loaded:
                await self._engine.unload(hosted.engine_name)
        finally:
            await asyncio.to_thread(hosted.snapshot.close)

    def _check_pin(self, name: str, *, preload: bool, pin: bool, owner: str) -> None:
        if not pin:
            return
        if owner:
            raise AdapterError(403, "pin takes a slot from every tenant: only the administrator's adapters can have it")
        if not preload:
            raise AdapterError(400, "pin keeps an adapter loaded, and preload=false does not load it: leave one out")
        pinned = sum(hosted.pin for hosted in self._hosted.values() if hosted.key != name)
        if pinned + 1 >= self._engine.slots:
            raise AdapterError(
                507,
                f"no slot is free to pin {name!r} in: {pinned} of {self._engine.slots} (--max-loras) are pinned, and "
                "one stays for the other adapters; unpin one (update with pin=false), or serve with more",
            )

    def _check_count(self, owner: str) -> None:
        count = sum(hosted.is_clients and hosted.owner == owner for hosted in self._hosted.values())
        if count >= self._max_of_clients:
            raise AdapterError(
                400,
                f"{count} adapters are registered, and {'a tenant' if owner else 'clients'} may have "
                f"{self._max_of_clients} (--max-client-adapters): delete one first",
            )

    def _seen_by(self, owner: str | None) -> list[_Hosted]:
        """By name; of two of one name the owner's own."""
        found = {hosted.key: hosted for hosted in self._hosted.values() if not hosted.owner or owner is None}
        if owner:
            found |= {hosted.name: hosted for hosted in self._hosted.values() if hosted.owner == owner}
        return [found[key] for key in sorted(found)]

    def _owned(self, name: str, owner: str) -> _Hosted:
        """An adapter that `owner` may change. Raises: AdapterError."""
        hosted = self._hosted.get(self.key_of(name, owner))
        if hosted is None:
            raise self._unknown(name)
        if hosted.owner != owner:
            raise AdapterError(403, f"adapter {name!r} is the administrator's: register one of your own")
        return hosted

    def _unknown(self, name: str) -> AdapterError:
        if reason := self._refused.get(name):
            return AdapterError(404, f"adapter {name!r} was refused at the start: {reason}; then register it")
        return AdapterError(
            404, f"there is no adapter {name!r:.140}: register it with POST /adapters, or see GET /adapters"
        )

    async def _format(self, hosted: _Hosted) -> None:
        """Give an adapter its formatters, in place of those it had. A tenant's has none: see `refuse_formatters`."""
        if self._formatters is None or hosted.owner:
            return
        try:
            await asyncio.to_thread(self._formatters.add, hosted.key, hosted.directory)
        except HotspanError as error:
            raise AdapterError(400, f"adapter {hosted.name!r}: {error}") from error

    async def _restore_formatter(self, hosted: _Hosted) -> None:
        try:
            await self._format(hosted)
        except AdapterError as error:
            logger.warning("adapter_formatter_lost name=%s: %s", hosted.name, error)

    async def _drop_formatter(self, key: str) -> None:
        if self._formatters is not None:
            await asyncio.to_thread(self._formatters.remove, key)

    def _start(self, work: Coroutine[Any, Any, _T]) -> "asyncio.Task[_T]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
