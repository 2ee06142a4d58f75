"""What the registry of adapters speaks of, and what it needs of others."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


class AdapterEngine(Protocol):
    """What the registry needs of an engine with LoRA (engine/adapters.py)."""

    @property
    def slots(self) -> int:
        """How many adapters can compute at once."""
        ...

    @property
    def is_dead(self) -> bool: ...

    def has(self, name: str) -> bool:
        """Whether a name is the base model's, or that of an adapter that is none of the registry's."""
        ...

    def name_of(self, name: str, digest: str, owner: str) -> str:
        """What the engine calls an adapter of this name, content and owner."""
        ...

    async def load(self, engine_name: str, path: Path) -> None:
        """Load an adapter from its files. Raises: EngineError with the cause."""
        ...

    async def pin(self, engine_name: str) -> None:
        """Keep a loaded adapter in its slot. Raises: EngineError."""
        ...

    async def unpin(self, engine_name: str) -> None:
        """Let a pinned adapter be evicted again."""
        ...

    async def unload(self, engine_name: str) -> None:
        """Give an unpinned adapter up once its requests have ended; its files are not read any more then."""
        ...


class AdapterFormatters(Protocol):
    """Where adapters' own formatters go (hotspan.formatters); calls may take as long as `model.py` does."""

    def add(self, adapter: str, directory: Path) -> None:
        """Take what stands in a directory, in the place of what the adapter had. Raises: HotspanError."""
        ...

    def remove(self, adapter: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter as its operator sees it. owner: the tenant whose it is; "" is the server, whose are everybody's."""

    name: str
    owner: str
    src: str
    preload: bool
    pin: bool
    is_loaded: bool
    digest: str


@dataclass(frozen=True, slots=True)
class Page:
    """A part of all adapters, by name; `next_page_token` asks for the rest, None if there is none."""

    adapters: tuple[Adapter, ...]
    next_page_token: int | None


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """An adapter as the engine names it in the names of KV."""

    name: str
    path: str
