"""Encoder outputs in a real engine: an image that ends in a prompt's last, partial chunk is encoded once."""

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from transformers.utils import is_torchvision_available

from hotspan.bench.prose import prose
from hotspan.config.settings import L2Settings
from hotspan.core.directives import Directives
from hotspan.engine.contract import ENGINE, TRIED_WITH
from hotspan.engine.requests import SERVER_DIRECTIVES
from kit.engine import CHUNK, Rig, rig, sampling
from kit.families.vision import SIGHTS, Sight, make_sight

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(ENGINE != TRIED_WITH, reason="outputs are kept with another release only"),
    pytest.mark.skipif(not is_torchvision_available(), reason="the processors need torchvision"),
]

OPTIONS: dict[str, Any] = {
    "max_model_len": 2048,
    "max_num_batched_tokens": 512,
    "limit_mm_per_prompt": {"image": 2},
}
RED, LIME = (Image.new("RGB", (112, 112), colour) for colour in ("red", "lime"))
TEXT = prose(5, 300)
"""So long that the image reaches into a prompt's last chunk."""


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A list with how many media each step encoded."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    execute, counts = GPUModelRunner._execute_mm_encoder, list[int]()

    def counted(runner: Any, scheduled: Any) -> Any:
        found = execute(runner, scheduled)
        counts.append(len(found))
        return found

    monkeypatch.setattr(GPUModelRunner, "_execute_mm_encoder", counted)
    yield counts


class Asked:
    """Asks an engine about images behind a text; the engine's own prefix cache is empty each time."""

    def __init__(self, engine: Rig, sight: Sight, encoded: list[int]) -> None:
        self._engine = engine
        self._sight = sight
        self._encoded = encoded

    def __call__(
        self, *images: Image.Image, text: str = TEXT, tenant: str | None = "acme", salt: str | None = None
    ) -> tuple[list[int], int]:
        """The answer's tokens, and how many media were encoded. tenant: None if no server of hotspan's has named it."""
        engine = self._engine
        engine.settle()
        engine.forget_gpu()
        self._encoded.clear()
        prompt: dict[str, Any] = {
            "prompt": f"{text}{self._sight.image * len(images)} so",
            "multi_modal_data": {"image": list(images)},
        }
        params = sampling(12, {} if tenant is None else {SERVER_DIRECTIVES: Directives(tenant=tenant).to_json()})
        named = prompt | ({} if salt is None else {"cache_salt": salt})
        (output,) = engine.llm.generate([named], params, use_tqdm=False)
        self.is_hit = output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // CHUNK * CHUNK > 0
        return list(output.outputs[0].token_ids), sum(self._encoded)

    def empty_own(self) -> None:
        """Empty the engine's own cache of encoder outputs."""
        self._engine.core.reset_encoder_cache()

    def crowd_out(self) -> None:
        """Let other images take the place of all in the engine's own cache, as in daily use."""
        known = self._engine.scheduler.encoder_cache_manager
        before = set(known.cached)
        for number in range(200):
            if before.isdisjoint(known.cached):
                return
            self(Image.new("RGB", (112, 112), (number, 1, 2)), text="", tenant="others")
        raise AssertionError("the engine's own cache keeps everything")


@pytest.mark.parametrize("sight", [pytest.param(sight, id=str(sight)) for sight in SIGHTS])
def test_an_image_at_the_end_is_encoded_once(sight: Sight, tmp_path: Path, encoded: list[int]) -> None:
    """From RAM, from disk, after a restart and from an L2 the encoder does not run, and the tokens are the same as
    without it, also for two images in either order. Another image, tenant or salt is encoded, and so is what comes
    from disk with a flipped bit."""
    model = make_sight(sight, tmp_path)
    with rig(model, cache={"encoder_outputs": False}, **OPTIONS) as engine:
        ask = Asked(engine, sight, encoded)
        red, lime = ask(RED), ask(LIME)
        ask.empty_own()
        two, swapped = ask(RED, LIME), ask(LIME, RED)
        assert [red[1], lime[1], two[1], swapped[1]] == [1, 1, 2, 0]
        assert len({tuple(tokens) for tokens, _ in (red, lime, two, swapped)}) == 4
        ask.empty_own()
        assert (ask(RED), ask.is_hit) == (red, True), "the image must reach into the chunk that is not whole"
    again, l2 = (red[0], 0), {"l2": L2Settings((tmp_path / "l2").as_uri())}
    with rig(model, disk=tmp_path / "kv", cache=l2, **OPTIONS) as engine:
        ask = Asked(engine, sight, encoded)
        assert ask(RED) == red
        for _ in range(2):
            ask.empty_own()
            assert (ask(RED), ask.is_hit) == (again, True)
        assert ask(LIME) == lime
        for _ in range(2):
            ask.empty_own()
            assert (ask(LIME, RED), ask(RED, LIME)) == ((swapped[0], 0), (two[0], 0))
        for other in ({"tenant": "globex"}, {"salt": "another"}, {"tenant": None}):
            ask.empty_own()
            assert ask(RED, **other) == red
        ask.crowd_out()
        engine.evict_ram()
        assert not engine.cache.ram.entries
        assert ask(RED) == again
        ask.empty_own()
        assert ask(RED) == again
        check(engine)
    with rig(model, disk=tmp_path / "kv", **OPTIONS) as engine:
        ask = Asked(engine, sight, encoded)
        assert (ask(RED), ask.is_hit, ask(LIME)) == (again, True, (lime[0], 0))
        ask.empty_own()
        assert ask(RED, LIME) == (two[0], 0)
        check(engine)
    with rig(model, cache=l2, **OPTIONS) as engine:
        ask = Asked(engine, sight, encoded)
        assert (ask(RED), ask.is_hit) == (again, True)
        check(engine)
    flip_outputs(tmp_path / "kv" / "slab")
    with rig(model, disk=tmp_path / "kv", **OPTIONS) as engine:
        ask = Asked(engine, sight, encoded)
        assert (ask(RED), ask.is_hit) == (red, True)
        ask.empty_own()
        assert ask(RED) == again
        check(engine)


def check(engine: Rig) -> None:
    """Nothing is left pinned, and no KV was another's."""
    engine.settle()
    assert engine.digests.wrong == 0
    assert not engine.cache.ram.is_pinned
    engine.cache.check()


def flip_outputs(slab: Path) -> None:
    """Flip a bit in each encoder output on disk."""
    with slab.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        at, flipped = data.find(b"HSENCOD1"), 0
        while at >= 0:
            data[at + 100] ^= 1
            flipped += 1
            at = data.find(b"HSENCOD1", at + 1)
    assert flipped >= 2
