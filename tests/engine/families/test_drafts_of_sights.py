"""EAGLE with a vision model: a trained head drafts for LLaVA around a trained Llama, and images hit with its KV."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks.speculators import rota
from hotspan.core.directives import Directives
from hotspan.engine.requests import SERVER_DIRECTIVES
from kit.engine import SPECULATIVE, Answer, engine_alone, rig, sampling
from kit.families.vision import make_seeing_target
from tests.engine.test_speculative import accepted

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNK, TEXT, ANSWER = 64, 300, 48
ENGINE: dict[str, Any] = {
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_batched_tokens": 512,
    "num_gpu_blocks_override": 160,
    "limit_mm_per_prompt": {"image": 1},
}
FROM_SERVER = {SERVER_DIRECTIVES: Directives().to_json()}
"""Of other servers no media are cached."""
RED, LIME = (Image.new("RGB", (56, 56), colour) for colour in ("red", "lime"))


def ask(engine: Any, image: Image.Image) -> Answer:
    """The answer to an image and a text that goes on by a rule."""
    text = "<image>" + engine.llm.get_tokenizer().decode(engine.llm.get_tokenizer().encode(rota(1))[:TEXT])
    prompt = {"prompt": text, "multi_modal_data": {"image": image}}
    (output,) = engine.llm.generate([prompt], sampling(ANSWER, FROM_SERVER), use_tqdm=False)
    first = output.outputs[0]
    counts = getattr(first, "spec_decode_metrics", None)
    return Answer(list(first.token_ids), output.num_cached_tokens, counts)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_images_hit_with_the_heads_kv(method: str, tmp_path: Path) -> None:
    """The tokens are those without drafts and cache: computed, from RAM, from disk, and after a restart. As many drafts
    are right each time, 60 % at least; another image is another prompt."""
    model = make_seeing_target(SPECULATIVE / "target", tmp_path / "model")
    with engine_alone(model, **ENGINE) as plain:
        wanted = {image: ask(plain, picture).tokens for image, picture in (("red", RED), ("lime", LIME))}
    head = {"method": method, "model": str(SPECULATIVE / method), "num_speculative_tokens": 3}
    drafting = {"speculative_config": head, "per_request_spec_decode_metrics": "summary"}
    options = {"disk": tmp_path / "kv", "cache": {"chunk_tokens": CHUNK}, **ENGINE, **drafting}
    with rig(model, **options) as engine:
        cold = ask(engine, RED)
        assert (cold.cached, cold.tokens) == (0, wanted["red"])
        assert accepted([cold]) >= 0.6
        for is_in_ram in (True, False):
            engine.settle()
            if not is_in_ram:
                engine.evict_ram()
            engine.forget_gpu()
            check(engine, ask(engine, RED), cold)
        engine.forget_gpu()
        other = ask(engine, LIME)
        assert (other.cached, other.tokens) == (0, wanted["lime"])
        engine.settle()
        stored = engine.digests.stored
    with rig(model, **options) as engine:
        engine.digests.stored.update(stored)
        check(engine, ask(engine, RED), cold)


def check(engine: Any, found: Answer, cold: Answer) -> None:
    """All whole chunks of the image and the text are loaded as they were stored."""
    assert found.cached >= TEXT // CHUNK * CHUNK
    assert (found.tokens, found.speculation) == (cold.tokens, cold.speculation)
    assert engine.digests.wrong == 0 < engine.digests.loaded
    engine.cache.check()
