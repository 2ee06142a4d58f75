"""What routers are told of chunks: who follows the events knows what lies in which tier, and of what text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm.config.kv_events import KVEventsConfig

from hotspan.config.settings import DiskSettings
from hotspan.core.types import Tier

from .harness.core import CHUNK, Core, core

SLOT_GIB = 16 / (1 << 20)
"""Of the harness's model: 16 KiB a chunk."""


class Told:
    """A publisher that keeps a follower's books of the events."""

    def __init__(self) -> None:
        self.held: dict[str, set[int]] = {"CPU": set(), "DISK": set(), "L2": set()}
        self.texts: dict[int, list[int]] = {}
        self.salts: dict[int, object] = {}
        self.gpu = 0

    def publish(self, batch: Any) -> None:
        for event in batch.events:
            if type(event).__name__ == "AllBlocksCleared":
                self.held, self.texts = {"CPU": set(), "DISK": set(), "L2": set()}, {}
            elif event.medium == "GPU":
                self.gpu += 1
            elif type(event).__name__ == "BlockRemoved":
                self.held[event.medium] -= set(event.block_hashes)
            else:
                (name,) = event.block_hashes
                self.held[event.medium].add(name)
                if event.token_ids:
                    assert event.block_size == CHUNK == len(event.token_ids)
                    before = [] if event.parent_block_hash is None else self.texts[event.parent_block_hash]
                    self.texts[name] = [*before, *event.token_ids]
                    (self.salts[name],) = event.extra_keys

    def shutdown(self) -> None:
        """There is nothing to end."""


def name_of(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def truth(engine: Followed) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {"CPU": set(), "DISK": set(), "L2": set()}
    for key in engine.seen:
        for tier in engine.cache.where(key):
            found[{Tier.RAM: "CPU", Tier.DISK: "DISK"}[tier]].add(name_of(key))
    return found


class Followed(Core):
    """An engine whose events are followed."""

    def __init__(self, running: Core) -> None:
        super().__init__(running.core)
        self.told = self.scheduler.kv_event_publisher = Told()
        self.seen: set[bytes] = set()
        add = self.cache.ram.add

        def seen(chunk: Any, *rest: Any, **named: Any) -> Any:
            self.seen.add(chunk.key)
            return add(chunk, *rest, **named)

        self.cache.ram.add = seen  # type: ignore[method-assign]

    def follow(self) -> None:
        """Give every chunk its turn."""
        self.settle()
        for _ in range(20):
            self.told.publish(type("Batch", (), {"events": self.manager.events.take()}))


@contextmanager
def following(tiny_model: Path, directory: Path) -> Iterator[Followed]:
    """RAM holds 20 chunks, the disk 60."""
    events = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    disk = {"disk": DiskSettings(str(directory), 60 * 20 * 1024)}
    with core(tiny_model, ram_gib=20 * SLOT_GIB, cache=disk, kv_events_config=events) as engine:
        yield Followed(engine)


@pytest.fixture
def engine(tiny_model: Path, tmp_path: Path) -> Iterator[Followed]:
    with following(tiny_model, tmp_path) as engine:
        yield engine


def test_who_follows_knows_what_lies_where(engine: Followed) -> None:
    """Through stores, evictions from RAM and disk, promotions and an invalidation; each chunk with its text."""
    texts = [engine.text(seed, 1536) for seed in range(12)]
    for text in texts:
        engine.ask(text)
        engine.settle()
    engine.follow()
    assert engine.told.held == truth(engine) and engine.told.gpu > 0
    assert engine.cache.ram.entries and len(engine.told.held["DISK"]) > len(engine.told.held["CPU"])
    known = {tuple(text) for text in engine.told.texts.values()}
    assert all(tuple(text[: n * CHUNK]) in known for text in texts for n in range(1, 6))
    engine.forget_gpu()
    cached = [engine.ask(text) for text in texts]
    assert max(cached) >= 1280 and min(cached) == 0  # from the disk, and evicted from there, too
    engine.follow()
    assert engine.told.held == truth(engine)
    engine.administer(do="invalidate")
    engine.follow()
    assert engine.told.held == truth(engine) == {"CPU": set(), "DISK": set(), "L2": set()}
    assert not engine.manager.events._media


def test_after_a_restart_it_is_told_with_the_first_request(tiny_model: Path, tmp_path: Path) -> None:
    """What a former process left on the disk is named by its text again as soon as a request uses it."""
    for is_warm in (False, True):
        with following(tiny_model, tmp_path) as engine:
            text = engine.text(99, 1536)
            assert (engine.ask(text) >= 1280) is is_warm
            engine.follow()
            assert tuple(text[:1280]) in {tuple(known) for known in engine.told.texts.values()}
            assert engine.told.held == truth(engine) and len(engine.told.held["DISK"]) >= 5


def test_a_salt_is_told_with_the_first_chunk(engine: Followed) -> None:
    """As the engine tells it of its own blocks: what else a name depends on stands beside it."""
    engine.ask(engine.text(1, 1024), salt="tenant-a")
    engine.follow()
    by_length = {len(text): engine.told.salts[name] for name, text in engine.told.texts.items()}
    assert by_length[CHUNK] == ("tenant-a",) and by_length[2 * CHUNK] is None


def test_nothing_is_noted_where_nobody_asked(tiny_model: Path) -> None:
    """Without events in the engine's configuration RAM keeps no notes of what left it."""
    with core(tiny_model) as engine:
        engine.ask(engine.text(1, 1024))
        assert engine.cache.ram.gone is None and engine.manager.events is None
