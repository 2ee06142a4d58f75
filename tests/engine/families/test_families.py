"""Each family through the cache: hits from RAM, disk and L2, after a restart and a preemption, change no token."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotspan.config.settings import L2Settings
from kit.demo_adapter import LORA_RANK
from kit.engine import CHUNK, Rig, rig
from kit.families.make import make_adapter, make_family
from kit.families.table import FAMILIES, Family

pytestmark = pytest.mark.engine

WHOLE = 5 * CHUNK
PROMPT = WHOLE + 60
"""Tokens. The engine's own hit, of whole blocks, ends where that of whole chunks does: bfloat16 needs that."""

FULL = 7 * CHUNK - 50
"""Tokens of a prompt whose answer soon needs another block, however large the engine makes its blocks."""

_TIES = {"float32": 1e-3, "bfloat16": 0.05}
_EACH = [pytest.param(family, id=str(family), marks=() if family.in_gate else pytest.mark.slow) for family in FAMILIES]


@contextmanager
def engine(family: Family, model: Path, **options: Any) -> Iterator[Rig]:
    """The family's engine, in which a prompt takes several steps."""
    given: dict[str, Any] = {
        "dtype": family.dtype,
        "max_model_len": 2048,
        "max_num_batched_tokens": 512,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": 1 << 25,
        **family.engine,
    }
    with rig(model, ram_gib=0.05, **(given | options)) as running:
        yield running


def check(running: Rig) -> None:
    running.settle()
    assert running.digests.wrong == 0
    running.cache.check()


def hit(running: Rig, prompt: list[int], tokens: list[int], *, loads: int = WHOLE) -> None:
    """The prompt's whole chunks are hits, as they were stored, and the answer is the one it had.

    loads: tokens that the metrics count.
    """
    running.forget_gpu()
    before = running.digests.hit_tokens
    answer = running.ask(prompt, len(tokens))
    assert (answer.cached, answer.tokens) == (WHOLE, tokens)
    assert running.digests.hit_tokens - before == loads
    check(running)


def preempted(running: Rig, prompt: list[int], tokens: int) -> list[int]:
    """The answer to a prompt that is preempted twice for lack of blocks: at its begin, and while it is answered.

    Each time the engine's own cache is empty when it goes on.
    """
    engine, scheduler, found = running.llm.llm_engine, running.core.scheduler, list[int]()
    running.start("7", prompt, tokens)
    (request,) = scheduler.requests.values()
    pool = scheduler.kv_cache_manager.block_pool
    for times, computed in enumerate((1, len(prompt)), 1):
        while request not in scheduler.running or request.num_computed_tokens < computed:
            engine.step()
        taken = pool.get_new_blocks(pool.get_num_free_blocks())
        while request.num_preemptions < times:
            assert engine.has_unfinished_requests(), "it ended without another block"
            engine.step()
            if request.num_preemptions < times:  # what a sliding window has left behind
                taken += pool.get_new_blocks(pool.get_num_free_blocks())
        pool.free_blocks(taken)
        assert scheduler.reset_prefix_cache()
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
    return found


@pytest.mark.parametrize("family", _EACH)
def test_family(family: Family, tiny_model: Path, tmp_path: Path) -> None:
    """Bytes come back as they were stored, and answers are those after the engine's own hit."""
    model = make_family(family, tmp_path / "model", tiny_model)
    disk, l2 = tmp_path / "kv", {"l2": L2Settings((tmp_path / "l2").as_uri())}
    with engine(family, model, disk=disk, cache=l2) as running:
        prompt = running.text(1, PROMPT)
        cold = running.ask(prompt, 12)
        running.settle()
        own = running.ask(prompt, 12)  # from the tiers, where the engine has no cache of its own
        assert (cold.cached, own.cached) == (0, WHOLE)
        assert running.is_same(prompt, cold.tokens, _TIES[family.dtype])
        other = running.ask(running.text(9, WHOLE) + prompt[WHOLE:], 12)
        assert other.tokens != own.tokens, "the answer must depend on what is cached"
        loads = 2 * CHUNK if family.keeps == "sliding windows only" else WHOLE
        hit(running, prompt, own.tokens, loads=loads)
        running.evict_ram()
        hit(running, prompt, own.tokens, loads=loads)
        longer = running.text(3, PROMPT + 128)
        running.ask(longer, 1)
        running.settle()
        tokens = running.manager.chunk_tokens
        expected = running.ask(longer, 1).cached // tokens * tokens
        running.forget_gpu()
        assert running.ask(longer, 1).cached == expected, "a hit is as long as the engine's own, in whole chunks"
        again = preempted(running, running.text(2, FULL), 80)
        check(running)
        running.forget_gpu()
        assert running.is_same(running.text(2, FULL), again, _TIES[family.dtype])
        stored = running.digests.stored
    for tiers in ({"disk": disk}, {"cache": l2}):
        with engine(family, model, **tiers) as running:
            running.digests.stored.update(stored)
            hit(running, prompt, own.tokens, loads=loads)


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family in FAMILIES if family.lora != "no"], ids=str)
def test_adapters(family: Family, tiny_model: Path, tmp_path: Path) -> None:
    """The base model and two adapters each find their own KV only, after a restart too, and have their own answers."""
    from vllm.lora.request import LoRARequest

    family = replace(family, fields={**family.fields, **(family.dense or {})})
    model = make_family(family, tmp_path / "model", tiny_model)
    paths = {name: make_adapter(tmp_path / name, model, seed) for seed, name in enumerate("ab", 1)}
    loras = [None, *(LoRARequest(name, n, str(path)) for n, (name, path) in enumerate(paths.items(), 1))]
    options = {"disk": tmp_path / "kv", "enable_lora": True, "max_loras": 2, "max_lora_rank": LORA_RANK}
    answers: list[list[int]] = []
    with engine(family, model, **options) as running:
        prompt = running.text(1, PROMPT)
        for lora in loras:
            assert running.ask(prompt, 12, lora=lora).cached == 0
            running.settle()
            answers.append(running.ask(prompt, 12, lora=lora).tokens)  # the engine's own hit
        assert len({tuple(tokens) for tokens in answers}) == len(loras), "an adapter changes nothing"
        stored = hits(running, prompt, loras, answers)
    with engine(family, model, **options) as running:
        running.digests.stored.update(stored)
        hits(running, prompt, loras, answers)


def hits(running: Rig, prompt: list[int], loras: list[Any], answers: list[list[int]]) -> dict[Any, bytes]:
    """Each gets a hit with its answer, from what the tiers have; what was stored up to now."""
    running.forget_gpu()
    for lora, tokens in zip(loras, answers, strict=True):
        answer = running.ask(prompt, 12, lora=lora)
        assert (answer.cached, answer.tokens) == (WHOLE, tokens)
        check(running)
    return running.digests.stored
