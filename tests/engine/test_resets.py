"""What vLLM's reset of a connector empties: `sleep`, `/pause`, `reset_prefix_cache(reset_connector=True)`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hotspan.core.types import Tier
from kit.engine import CHUNK
from kit.simulated.memory_store import MemoryServer

from .harness.core import Core, core

RESETS: dict[str, Callable[[Core], object]] = {
    "sleep": lambda engine: (engine.core.sleep(1), engine.core.wake_up()),
    "reset": lambda engine: engine.core.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
}


@pytest.mark.parametrize("how", RESETS)
def test_a_reset_empties_this_engines_ram_alone(tiny_model: Path, tmp_path: Path, how: str) -> None:
    """One engine is reset: it finds its text on its disk, another replica in the L2, and no log has an entry of it."""
    server = MemoryServer()
    with core(tiny_model, disk=tmp_path / "disk", l2=server) as reset, core(tiny_model, l2=server) as other:
        text = reset.stored(reset.text(1, 3 * CHUNK + 8))
        logged, entries = reset.logged(), len(server.entries)
        RESETS[how](reset)
        reset.settle()
        assert reset.cache.usage()[Tier.RAM].chunks == 0
        assert (reset.logged(), len(server.entries)) == (logged, entries)
        assert reset.cache.usage()[Tier.DISK].chunks == len(server.objects) == 3
        assert reset.ask(text) == other.ask(text) == 3 * CHUNK
        reset.check()
        other.check()


@pytest.mark.parametrize("how", RESETS)
def test_a_reset_while_requests_run_leaves_right_bytes(tiny_model: Path, tmp_path: Path, how: str) -> None:
    """Resets between any two steps of requests that store, load and promote: no byte is wrong, no slot is lost."""
    with core(tiny_model, disk=tmp_path / "disk") as engine:
        texts = [engine.text(seed, 3 * CHUNK + 8) for seed in range(4)]
        for turn in range(12):
            for number, text in enumerate(texts):
                engine.start(f"{turn}-{number}", text, 4)
            engine.step(turn % 5)
            RESETS[how](engine)
            engine.finish()
            engine.check()
        engine.settle()
        assert not any(entry.pins or entry.is_used for entry in engine.cache.ram.entries.values())
        engine.stored(texts[0])
        engine.forget_gpu()
        assert engine.ask(texts[0]) == 3 * CHUNK
        engine.check()
