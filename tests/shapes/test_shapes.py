"""Each shape gives the answers of an engine without hotspan, cold, hit and after a restart; or its start is refused."""

import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from hotspan.core.types import CHUNK_TOKENS
from hotspan.demo import model as demo
from hotspan.demo.model import make_demo_model
from kit.preloaded import Preloaded
from tests.leftovers import ALLOWED
from tests.tiers.mounts import mounted

from .engines import BLOCK, POOL_BLOCKS, Answer, Engine, Refused, preloaded, running, slabs
from .table import SHAPES, Shape

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(3000)]

LENGTH, CHUNK = 600, CHUNK_TOKENS
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
def source() -> Iterator[Preloaded]:
    """What starts engines."""
    with preloaded() as started:
        yield started


@pytest.fixture(scope="session")
def truth(source: Preloaded, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """The answers of an engine without hotspan."""
    plain = Shape("LLM", "one rank")
    with running(plain, tiny_model, tmp_path_factory.mktemp("truth"), is_cached=False, source=source) as engine:
        return [engine.ask(text_of(seed)) for seed in range(TEXTS)]


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Path]]:
    """The /dev/shm of each host: nobody else's slabs are there."""
    shape: Shape = request.node.callspec.params["shape"]
    if os.geteuid():
        pytest.skip("a /dev/shm of its own needs root")
    with ExitStack() as stack:
        yield [stack.enter_context(mounted(tmp_path / f"shm{n}", "tmpfs", "size=2g")) for n in range(shape.nodes)]


RAYS = re.compile(r"pymp-[a-z0-9_]{8}")
METRICS = re.compile(r"(counter|gauge_[a-z]+|histogram|summary)_\d+\.db")


def is_vllms(path: Path) -> bool:
    """Whether it is vLLM's: the directory in which several API servers of one `vllm serve` sum their metrics. It is
    removed by the process that made it, and stays when that is killed. So does that of a process of Ray's dashboard.
    """
    if RAYS.fullmatch(path.name):
        return True
    return path.is_dir() and all(METRICS.fullmatch(file.name) for file in path.iterdir())


@pytest.fixture
def temporary() -> Iterator[None]:
    """What is left in TMPDIR is vLLM's; of that, the directory of metrics is removed here."""
    place = Path(tempfile.gettempdir())
    before = set(place.iterdir())
    yield
    left = [path for path in place.iterdir() if path not in before and not ALLOWED.fullmatch(path.name)]
    assert all(map(is_vllms, left)), left
    for path in left:
        shutil.rmtree(path)


def ask_all(engine: Engine, truth: list[Answer]) -> list[int]:
    """The cached tokens of each text, of each replica. They are asked in turn, and together are more than the engine's
    own pool.
    """
    assert TEXTS * LENGTH > POOL_BLOCKS * BLOCK
    cached = []
    for replica in range(engine.shape.replicas):
        for seed, true in enumerate(truth):
            answer = engine.ask(text_of(seed), replica)
            assert answer.text == true.text, (engine.shape, seed)
            for have, want in zip(answer.chances, true.chances, strict=True):
                assert abs(have - want) < CLOSE, (engine.shape, seed)
            cached.append(answer.cached)
    return cached


def reload_weights(engine: Engine, truth: list[Answer], other: Path) -> None:
    """Other weights while the engine runs: nothing of before is found, and what is computed then is."""
    engine.reload(other)
    computed = [engine.ask(text_of(seed)) for seed in range(TEXTS)]
    assert max(answer.cached for answer in computed) < CHUNK, computed
    assert all(answer.text != true.text for answer, true in zip(computed, truth, strict=True))
    ask_all(engine, computed)  # those that came before the weights had a name were not kept
    hit = ask_all(engine, computed)
    assert min(hit) >= WHOLE, hit


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shape(
    shape: Shape,
    source: Preloaded,
    tiny_model: Path,
    other_model: Path,
    truth: list[Answer],
    tmp_path: Path,
    hosts: list[Path],
    temporary: None,
) -> None:
    """Cold, hit, invalidation, restart, weights reloaded and kill: the answers of an engine without hotspan, or words
    at the start; what vLLM can't compute fails alike without hotspan.
    """
    started = partial(running, shape, tiny_model, tmp_path, hosts[-1], own=hosts[0], source=source)
    if shape.fails is not None:
        for is_cached in (False, True):
            with pytest.raises((Refused, AssertionError)), started(is_cached=is_cached) as engine:
                ask_all(engine, truth)
            logs = list(tmp_path.glob("*-node*.log"))
            assert any(shape.fails in log.read_text() for log in logs)
            for log in logs:
                log.unlink()
    elif shape.refused is not None:
        with pytest.raises(Refused, match=shape.refused), started():
            pass
    else:
        with started() as engine:
            cold, hit = ask_all(engine, truth), ask_all(engine, truth)
            assert max(cold) < CHUNK and min(hit) >= WHOLE, (cold, hit)
            engine.forget()
            gone = ask_all(engine, truth)
            assert max(gone) < CHUNK, gone
        with started() as engine:
            warm = ask_all(engine, truth)
            assert min(warm) >= WHOLE if shape.has_disk else max(warm) < CHUNK, warm
            assert not any(map(slabs, hosts[1:])), "a further host's slab kept its name"
            reload_weights(engine, truth, other_model)
            engine.kill()
    assert not any(map(slabs, hosts))
