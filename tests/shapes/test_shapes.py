"""Each shape gives the answers of an engine without hotspan, cold, hit and after a restart; or its start is refused."""

import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.core.types import CHUNK_TOKENS
from hotspan.demo import model as demo
from hotspan.demo.model import make_demo_model
from tests.tiers.mounts import mounted

from .engines import BLOCK, POOL_BLOCKS, Answer, Engine, Refused, running, slabs
from .table import SHAPES, Shape

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3000)]

LENGTH, CHUNK = 1500, CHUNK_TOKENS
WHOLE = LENGTH // CHUNK * CHUNK
TEXTS = 4
CLOSE = 2e-3
"""Between log-probabilities of two engines, whose sums are rounded otherwise."""


def text_of(seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(10, 700) for _ in range(LENGTH)]


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other weights of the same shape."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(demo, "VERSION", 1000)
        return make_demo_model(tmp_path_factory.mktemp("other") / "model", "tiny").path


@pytest.fixture(scope="session")
def truth(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The answers of an engine without hotspan."""
    plain = Shape("LLM", "one rank")
    with running(plain, tiny_model, tmp_path_factory.mktemp("truth"), is_cached=False) as engine:
        return [engine.ask(text_of(seed)) for seed in range(TEXTS)]


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path | None]:
    """The /dev/shm of a further host."""
    shape: Shape = request.node.callspec.params["shape"]
    if shape.nodes > 1 and os.geteuid():
        pytest.skip("a /dev/shm of its own needs root")
    with mounted(tmp_path / "shm", "tmpfs", "size=2g") if shape.nodes > 1 else nullcontext(None) as path:
        yield path


def ask_all(engine: Engine, truth: list[Answer]) -> list[int]:
    """The most cached tokens of each text. They are asked in turn, and together are more than the engine's own pool."""
    assert TEXTS * LENGTH > POOL_BLOCKS * BLOCK
    cached = [0] * TEXTS
    for _ in range(1 if engine.shape.replicas == 1 else 3 * engine.shape.replicas):
        for seed, true in enumerate(truth):
            answer = engine.ask(text_of(seed))
            assert answer.text == true.text, (engine.shape, seed)
            for have, want in zip(answer.chances, true.chances, strict=True):
                assert abs(have - want) < CLOSE, (engine.shape, seed)
            cached[seed] = max(cached[seed], answer.cached)
    return cached


def reload_weights(engine: Engine, truth: list[Answer], other: Path) -> None:
    """Other weights while the engine runs: nothing of before is found, and what is computed then is."""
    engine.reload(other)
    computed = [engine.ask(text_of(seed)) for seed in range(TEXTS)]
    assert engine.shape.replicas > 1 or max(answer.cached for answer in computed) < CHUNK, computed
    assert all(answer.text != true.text for answer, true in zip(computed, truth, strict=True))
    ask_all(engine, computed)  # those that came before the weights had a name were not kept
    hit = ask_all(engine, computed)
    assert min(hit) >= WHOLE, hit


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape(
    shape: Shape, tiny_model: Path, other_model: Path, truth: list[Answer], tmp_path: Path, shared: Path | None
) -> None:
    """Cold, hit, invalidation, restart, weights reloaded and kill: the answers of an engine without hotspan, or words
    at the start.
    """
    before = set(slabs(SHARED_MEMORY))
    if shape.refused is not None:
        with pytest.raises(Refused, match=shape.refused), running(shape, tiny_model, tmp_path, shared):
            pass
    else:
        with running(shape, tiny_model, tmp_path, shared) as engine:
            cold, hit = ask_all(engine, truth), ask_all(engine, truth)
            assert min(hit) >= WHOLE and (shape.replicas > 1 or max(cold) < CHUNK), (cold, hit)
            engine.forget()
            (gone, *_) = ask_all(engine, truth)
            is_all = shape.start == "hotspan" or not shape.has_disk
            assert shape.replicas > 1 or not is_all or gone < CHUNK
        with running(shape, tiny_model, tmp_path, shared) as engine:
            warm = ask_all(engine, truth)
            assert min(warm) >= WHOLE if shape.has_disk else shape.replicas > 1 or max(warm) < CHUNK, warm
            if shared is not None:
                assert not slabs(shared), "a further host's slab kept its name"
            reload_weights(engine, truth, other_model)
            engine.kill()
    assert set(slabs(SHARED_MEMORY)) <= before
    assert shared is None or not slabs(shared)
