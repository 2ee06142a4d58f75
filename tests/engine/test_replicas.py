"""Data-parallel replicas of one server: each has its own directory in the one that was given."""

from pathlib import Path

from hotspan.core.types import Tier
from hotspan.tiers.directory import check_directory

from .harness.core import CHUNK, core

LENGTH = 900
WHOLE = LENGTH // CHUNK * CHUNK


def test_each_has_a_directory_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    """Two that run at once store under their own numbers, and each finds its own chunks again after a restart."""
    disk = tmp_path / "kv"
    with core(tiny_model, disk=disk, rank=0) as one, core(tiny_model, disk=disk, rank=1) as two:
        texts = [engine.stored(engine.text(n, LENGTH)) for n, engine in enumerate((one, two))]
        for engine, other in ((one, texts[1]), (two, texts[0])):
            assert engine.ask(other, no_store=True) == 0
            engine.check()
        assert sorted(each.name for each in disk.iterdir()) == ["replica-0", "replica-1"]
    with core(tiny_model, disk=disk, rank=1) as again:
        assert again.cache.usage()[Tier.DISK].chunks == WHOLE // CHUNK
        assert (again.ask(texts[1]), again.ask(texts[0])) == (WHOLE, 0)
        again.settle()
        again.check()


def test_another_number_of_replicas_is_warm(tiny_model: Path, tmp_path: Path) -> None:
    """Two replicas, then three, then one: each finds its chunks again, and the only one finds those of the first."""
    disk = tmp_path / "kv"
    with core(tiny_model, disk=disk, rank=0) as one, core(tiny_model, disk=disk, rank=1) as two:
        texts = [engine.stored(engine.text(n, LENGTH)) for n, engine in enumerate((one, two))]
    for rank, text in ((0, texts[0]), (1, texts[1]), (2, None), (None, texts[0])):
        check_directory(disk, 1 << 20)  # as the server does before it starts
        with core(tiny_model, disk=disk, rank=rank) as again:
            assert text is None or again.ask(text) == WHOLE
            again.settle()
            again.check()
