"""Sliding windows and recurrent states beside full attention, over RAM, disk and L2: a layer reads its own bytes."""

from pathlib import Path

import pytest

from hotspan.core.types import Tier
from kit.simulated.memory_store import MemoryServer

from .harness.core import BLOCK, CHUNK, Core, core
from .harness.layers import Layers, States, Windows

LENGTH = 1900


def hit(layers: type[Layers]) -> int:
    """Tokens that are found of a text: whole chunks, which are whole blocks where states are kept."""
    size = BLOCK if layers is States else CHUNK
    return LENGTH // size * size


def check(engine: Core) -> None:
    engine.settle()
    engine.check()


@pytest.mark.parametrize("layers", [Windows, States])
def test_another_replica_loads_each_layer_s_own(layers: type[Layers], tiny_model: Path, tmp_path: Path) -> None:
    """What one computed is found in RAM, on disk after a restart, and by a replica that has only the L2; a text that
    goes on is found as far as it was computed. All that is read, in every group, is what was computed."""
    server = MemoryServer()
    with core(tiny_model, disk=tmp_path / "kv", l2=server, runner=layers) as engine:
        text = engine.stored(engine.text(1, LENGTH))
        engine.forget_gpu()
        read = engine.runner.read
        assert engine.ask(text) == hit(layers)
        assert engine.runner.read - read >= hit(layers)
        check(engine)
    with core(tiny_model, disk=tmp_path / "kv", runner=layers) as again:
        assert again.cache.usage()[Tier.DISK].chunks
        assert again.ask(text) == hit(layers)
        check(again)
    with core(tiny_model, l2=server, runner=layers) as other:
        assert other.ask(text, 3) == hit(layers)
        other.forget_gpu()
        longer = text + other.text(2, 700)
        assert other.ask(longer, 70) == hit(layers)
        forked = text[: 3 * CHUNK + 10] + other.text(3, 400)
        other.ask(forked, 3)  # the tiers may lack what the other group needs there
        check(other)


@pytest.mark.parametrize("layers", [Windows, States])
def test_an_invalidation_takes_every_layer_s(layers: type[Layers], tiny_model: Path, tmp_path: Path) -> None:
    """A tagged text is gone in all groups, here and for the replica that follows; another text stays."""
    server = MemoryServer()
    with core(tiny_model, disk=tmp_path / "kv", l2=server, runner=layers) as engine:
        gone, kept = engine.text(4, LENGTH), engine.text(5, LENGTH)
        engine.stored(kept, tags=["kept"])
        chunks = {tier: engine.cache.usage()[tier].chunks for tier in (Tier.RAM, Tier.DISK)}
        engine.stored(gone, tags=["gone"])
        receipt = engine.administer(do="invalidate", tags=["gone"])
        assert receipt["is_durable"]
        assert engine.ask(gone, no_store=True) == 0
        engine.forget_gpu()
        assert engine.ask(kept, no_store=True) == hit(layers)
        check(engine)
        assert {tier: engine.cache.usage()[tier].chunks for tier in chunks} == chunks
    with core(tiny_model, l2=server, runner=layers) as other:
        assert (other.ask(gone), other.ask(kept)) == (0, hit(layers))
        check(other)
