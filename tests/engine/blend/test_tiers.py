"""Windows below RAM in a real engine, and checks of what is blended: restart, encryption, damage, drift."""

from pathlib import Path
from typing import Any

import pytest
import torch

from hotspan.core.terms import DEFAULT_TENANT, Scope, tag_labels, tenant_label
from hotspan.engine.blend.agreement import LEAST
from kit.engine import Rig

from ..test_encryption import keys_in
from .engine import WINDOW, Library, ask, blending, of, worker

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TENANT = tenant_label(DEFAULT_TENANT)


def damage(directory: Path) -> None:
    """One bit of each page that is not empty, but those of the table and the log."""
    (slab,) = directory.rglob("slab*")
    data = bytearray(slab.read_bytes())
    for page in range(0, len(data), 4096):
        if any(data[page : page + 4096]):
            data[page + 1000] ^= 1
    slab.write_bytes(data)


@pytest.mark.parametrize("what", ["kept", "damaged", "tag", "text"])
def test_windows_on_disk_after_a_restart(tiny_model: Path, tmp_path: Path, what: str) -> None:
    """Sealed on disk, and found by the next process; not if a bit is flipped, or its document was invalidated."""
    options: dict[str, Any] = {"disk": tmp_path / "kv", "cache": keys_in(tmp_path)}
    with blending(tiny_model, **options) as engine:
        Library(engine, 1000, 3).learn(tags=["doc"])
        engine.settle()
        scope = {
            "tag": Scope(TENANT, labels=tag_labels(["doc"])),
            "text": Scope(TENANT, keys=frozenset([bytes(32)])),
        }.get(what)
        if scope is not None:
            engine.manager.invalidate([scope], lambda done: None)
            engine.settle()
    if what == "damaged":
        damage(tmp_path / "kv")
    with blending(tiny_model, **options) as engine:
        library = Library(engine, 1000, 3)
        prompt = library.prompt(2, 1, 0)
        answer = ask(engine, prompt)[0]
        if what == "kept":
            assert answer.blend is not None and answer.blend["reused"] == 6 * WINDOW
        else:
            assert answer.blend is None
            assert engine.is_same(prompt, answer.tokens)
        engine.settle()
        engine.cache.check()


def test_checks_find_a_drift_and_nothing_else(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all is recomputed the first token's distribution is that of a full prefill, and blending stays on; where
    values are lost it is not, and blending is off. Blocks come free, and other answers are as ever."""
    with blending(tiny_model, blend={"check_every": 1}) as engine:
        library = Library(engine, 2000, 3)
        library.learn()

        found = of(engine).checks._found

        def check(count: int) -> None:
            for _ in range(count):
                if of(engine).off is None:
                    assert ask(engine, library.prompt(2, 1, 0))[0].blend is not None
                    engine.settle()

        monkeypatch.setattr(of(engine), "_selected", everything)
        check(3)
        assert len(found) == 3 and all(each.agrees and each.kl < 1e-3 for each in found) and of(engine).off is None
        monkeypatch.undo()
        write = worker()._forward.write
        lost: Any = lambda blocks, run, layer, keys, values: write(blocks, run, layer, keys, torch.ones_like(values))  # noqa: E731
        monkeypatch.setattr(worker()._forward, "write", lost)
        check(4 * LEAST)
        assert of(engine).off is not None and sum(not each.agrees for each in found) >= 5
        monkeypatch.undo()
        prompt = library.prompt(1, 0, 2)
        answer = ask(engine, prompt)[0]
        assert answer.blend is None and engine.is_same(prompt, answer.tokens)
        free(engine)


def everything(plan: Any) -> list[int]:
    """All reused tokens."""
    return [place for reuse in plan.reused for place in range(reuse.run.start, reuse.run.stop)]


def free(engine: Rig) -> None:
    """All blocks are."""
    engine.settle()
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 47
