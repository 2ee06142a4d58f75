"""Adapters of a few bytes, and an engine that loads what it is told to."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hotspan.core.errors import EngineError
from hotspan.server.adapters.check import AdapterLimits
from hotspan.server.adapters.registry import AdapterRegistry
from hotspan.server.adapters.snapshots import SnapshotStore
from hotspan.server.adapters.source import CONFIG, WEIGHTS, Sources

MODULE = "model.layers.0.self_attn.q_proj"


def config(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"} | changes


def tensors(seed: int = 0, rank: int = 4, inputs: int = 16, outputs: int = 16) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        f"base_model.model.{MODULE}.lora_A.weight": rng.random((rank, inputs), dtype=np.float32),
        f"base_model.model.{MODULE}.lora_B.weight": rng.random((outputs, rank), dtype=np.float32),
    }


def write_adapter(
    directory: Path, seed: int = 0, *, weights: dict[str, np.ndarray] | None = None, **changes: Any
) -> Path:
    """An adapter in `directory`; another seed is another content."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG).write_text(json.dumps(config(**changes)))
    save_file(tensors(seed) if weights is None else weights, directory / WEIGHTS)
    return directory


class FakeEngine:
    """Loads at once, or when it is let, or not at all; remembers what it was asked."""

    def __init__(self, slots: int = 4) -> None:
        self.slots = slots
        self.is_dead = False
        self.loads: list[str] = []
        self.loaded: dict[str, Path] = {}
        self.pinned: set[str] = set()
        self.fails: str | None = None
        self.pin_fails: str | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.idle = asyncio.Event()
        self.idle.set()

    def has(self, name: str) -> bool:
        return name in ("base", "static")

    def name_of(self, name: str, digest: str, owner: str) -> str:
        return f"{name}@{digest[:12]}" + (f"-{owner}" if owner else "")

    async def load(self, engine_name: str, path: Path) -> None:
        self.loads.append(engine_name)
        await self.open.wait()
        if self.fails is not None:
            raise EngineError(self.fails)
        assert sorted(file.name for file in path.iterdir()) == [CONFIG, WEIGHTS]
        self.loaded[engine_name] = path

    async def pin(self, engine_name: str) -> None:
        assert engine_name in self.loaded and len(self.pinned) + 1 < self.slots
        if self.pin_fails is not None:
            raise EngineError(self.pin_fails)
        self.pinned.add(engine_name)

    async def unpin(self, engine_name: str) -> None:
        self.pinned.remove(engine_name)

    async def unload(self, engine_name: str) -> None:
        assert engine_name not in self.pinned
        await self.idle.wait()
        assert self.loaded.pop(engine_name).is_dir(), "the files went before the engine let go of them"


class Formats:
    """Formatters that refuse a directory with a file `broken`."""

    def __init__(self) -> None:
        self.added: dict[str, Path] = {}

    def add(self, adapter: str, directory: Path) -> None:
        if (directory / "broken").exists():
            raise EngineError("model.py: the formatter is broken")
        self.added[adapter] = directory

    def remove(self, adapter: str) -> None:
        self.added.pop(adapter, None)


class Rig:
    """A registry over a directory of adapters. Made on a running loop."""

    def __init__(self, path: Path, *, slots: int = 4, max_rank: int = 8, max_of_clients: int = 32) -> None:
        self.root = path / "adapters"
        self.root.mkdir(exist_ok=True)
        self.copies = path / "copies"
        self.engine = FakeEngine(slots)
        self.formats = Formats()
        self.registry = AdapterRegistry(
            self.engine,
            Sources([self.root]),
            SnapshotStore(self.copies),
            AdapterLimits(max_rank),
            self.formats,
            max_of_clients=max_of_clients,
        )

    def write(self, name: str, seed: int = 0, **changes: Any) -> str:
        write_adapter(self.root / name, seed, **changes)
        return name

    async def settle(self) -> None:
        """Let what was begun in the background end."""
        while self.registry._loader._tasks:
            await asyncio.gather(*self.registry._loader._tasks, return_exceptions=True)

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in self.copies.iterdir())
