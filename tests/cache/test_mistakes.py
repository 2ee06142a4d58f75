"""A call that raises half-way leaves nothing pinned, and may be made again."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from hotspan.cache.entry import Reader
from hotspan.cache.lower import LowerTiers
from hotspan.cache.prefetch import Prefetches
from hotspan.cache.ram import RamTier
from hotspan.cache.tiered import TieredCache
from hotspan.cache.waits import Waits
from hotspan.core.types import Lookup
from tests.cache.rig import Rig
from tests.cache.test_tiered import chain

FAILING: list[tuple[type, str]] = [
    *((TieredCache, name) for name in ("_touch", "release", "_end_one", "_has_parent")),
    *((RamTier, name) for name in ("copied", "let_go", "add", "above", "touch")),
    *((LowerTiers, name) for name in ("offer", "step", "join", "holds", "touch", "forget")),
    *((Waits, name) for name in ("wake", "release")),
    (Prefetches, "used"),
]


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=[f"{owner.__name__}.{name}" for owner, name in FAILING])
def test_a_call_that_raises_leaves_nothing_pinned(owner: type, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of these raises half of the time, and the caller makes a call that ends something again until it succeeds."""
    rng, whole = random.Random(name), getattr(owner, name)
    is_failing = True

    def failing(self: Any, *args: Any, **options: Any) -> Any:
        if is_failing and rng.random() < 0.5:
            raise KeyError("a mistake")
        return whole(self, *args, **options)

    def until_done(call: Callable[[], Any]) -> None:
        while True:
            try:
                return call()
            except KeyError:
                pass

    with Rig(ram=8, disk=16) as rig:
        monkeypatch.setattr(owner, name, failing)
        for text in (chain(f"{turn % 4}", 4) for turn in range(40)):
            reader = Reader()
            try:
                answers = [rig.cache.lookup(chunk, reader) for chunk in text]
                hits = [chunk.key for chunk, answer in zip(text, answers, strict=True) if answer is Lookup.HIT]
                rig.cache.begin_load(hits, reader)
                for key in hits:
                    until_done(lambda key=key: rig.cache.end_load([key]))  # type: ignore[misc]
            except KeyError:
                pass
            until_done(lambda reader=reader: rig.cache.release(reader))  # type: ignore[misc]
            try:
                placed = [placement.chunk for placement in rig.cache.begin_store(text)]
            except KeyError:
                continue
            try:
                rig.cache.end_store(placed)
            except KeyError:
                until_done(lambda placed=placed: rig.cache.end_store(placed, success=False))  # type: ignore[misc]
        is_failing = False
        rig.land()
        assert not rig.cache.ram.is_pinned and not rig.cache.ram.forgotten
        assert rig.cache._loading == rig.cache._storing == 0
        rig.cache.check()


def test_what_was_offered_last_is_written_before_anything_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that closes hands over what a load has just offered, and waits for it then, not before."""
    with Rig(ram=4, disk=4) as rig:
        rig.store(text := chain("a", 2))
        rig.land()
        rig.tier.discard(text[0].key)
        written, waits = len(rig.stores), list[int]()
        rig.ask(text, reader := Reader())
        rig.load(text, reader)
        assert rig.cache.is_persisting and len(rig.stores) == written

        def wait(timeout_s: float) -> None:
            waits.append(len(rig.stores))
            rig.tier.finish_all()

        monkeypatch.setattr(rig.cache, "wait", wait)
        rig.cache.close(1.0)
        assert waits and waits[0] > written
