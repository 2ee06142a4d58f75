"""Speculative decoding through the cache: the draft model's KV is stored, found and loaded with the target's."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.speculators import rota
from kit.engine import SPECULATIVE, Answer, Rig, engine_alone, rig

pytestmark = pytest.mark.engine

TARGET = SPECULATIVE / "target"
CHUNK, PROMPT, ANSWER = 64, 300, 48
CACHED = PROMPT // CHUNK * CHUNK
ENGINE: dict[str, Any] = {"block_size": 32, "max_model_len": 1024, "num_gpu_blocks_override": 160}
ACCEPTED = "vllm:spec_decode_num_accepted_tokens"
DRAFTED = "vllm:spec_decode_num_draft_tokens"


def speculating(disk: Path, **speculation: Any) -> AbstractContextManager[Rig]:
    """An engine with a disk tier that drafts three tokens a step; without arguments it drafts none."""
    config = {"num_speculative_tokens": 3} | speculation
    drafting = {"speculative_config": config, "per_request_spec_decode_metrics": "summary"} if speculation else {}
    return rig(TARGET, disk=disk, cache={"chunk_tokens": CHUNK}, **ENGINE, **drafting)


def prompts(engine: Any) -> list[list[int]]:
    encode = engine.llm.get_tokenizer().encode
    return [encode(rota(seed))[:PROMPT] for seed in (1, 2)]


def answers(engine: Any) -> list[Answer]:
    return [engine.ask(prompt, ANSWER) for prompt in prompts(engine)]


def without_speculation() -> list[list[int]]:
    with engine_alone(TARGET, **ENGINE) as engine:
        return [answer.tokens for answer in answers(engine)]


def counted(engine: Rig) -> dict[str, int]:
    """vLLM's own counters."""
    return {metric.name: metric.value for metric in engine.llm.get_metrics() if metric.name in (ACCEPTED, DRAFTED)}


def check(engine: Rig, found: list[Answer], cold: list[Answer]) -> None:
    """Hits of all whole chunks, with the same tokens and as many accepted drafts as when all was computed."""
    assert [answer.cached for answer in found] == [CACHED] * len(found)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in cold]
    assert [answer.speculation for answer in found] == [answer.speculation for answer in cold]
    assert engine.digests.wrong == 0 < engine.digests.loaded
    engine.cache.check()


def check_tiers(disk: Path, tokens: list[list[int]], draft_layers: int, **speculation: Any) -> list[Answer]:
    """The same tokens as without speculation, cold, from RAM, from disk, and from disk after a restart."""
    with speculating(disk, **speculation) as engine:
        groups = engine.core.scheduler.kv_cache_config.kv_cache_groups
        assert sum(len(group.layer_names) for group in groups) == 4 + draft_layers
        cold = answers(engine)
        assert [answer.cached for answer in cold] == [0] * len(cold)
        assert [answer.tokens for answer in cold] == tokens
        engine.settle()
        engine.forget_gpu()
        check(engine, answers(engine), cold)
        engine.settle()
        engine.evict_ram()
        engine.forget_gpu()
        check(engine, answers(engine), cold)
        stored = engine.digests.stored
    with speculating(disk, **speculation) as engine:
        engine.digests.stored.update(stored)
        check(engine, answers(engine), cold)
    return cold


def accepted(found: list[Answer]) -> float:
    """The share of drafted tokens that the target accepted."""
    counts = [answer.speculation.to_dict() for answer in found]
    return sum(c["num_accepted_draft_tokens"] for c in counts) / sum(c["num_draft_tokens"] for c in counts)


def test_eagle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trained EAGLE head drafts 60 % right, cold and after a hit from any tier, and no token differs for it. With the
    head's KV taken out of a hit the tokens stay the same and fewer drafts are right: that KV is what was loaded."""
    head = {"method": "eagle", "model": str(SPECULATIVE / "eagle")}
    cold = check_tiers(tmp_path / "kv", without_speculation(), 1, **head)
    assert accepted(cold) >= 0.6
    from hotspan.engine.worker import HostWorker

    copy = HostWorker._copy

    def without_draft_kv(self: HostWorker, job: Any, places: Any) -> int:
        moved = copy(self, job, places)
        for group, block, _, _ in [] if job.is_store else places:
            self._groups[group][-1].engine[-1, block] = 0
        return moved

    monkeypatch.setattr(HostWorker, "_copy", without_draft_kv)
    with speculating(tmp_path / "kv", **head) as engine:
        spoiled = answers(engine)
        assert [answer.tokens for answer in spoiled] == [answer.tokens for answer in cold]
        counts = counted(engine)
        assert counts[ACCEPTED] / counts[DRAFTED] == accepted(spoiled) < accepted(cold)


@pytest.mark.slow
def test_eagle3(tmp_path: Path) -> None:
    """The same with a trained EAGLE-3 head."""
    head = {"method": "eagle3", "model": str(SPECULATIVE / "eagle3")}
    assert accepted(check_tiers(tmp_path / "kv", without_speculation(), 1, **head)) >= 0.6


@pytest.mark.slow
def test_a_draft_model(tmp_path: Path) -> None:
    """A target that is its own draft model is always right: also after a hit it has the KV that it would compute."""
    draft = {"method": "draft_model", "model": str(TARGET)}
    assert accepted(check_tiers(tmp_path / "kv", without_speculation(), 4, **draft)) == 1


@pytest.mark.slow
def test_a_draft_model_of_another_shape(tmp_path: Path) -> None:
    """A draft model whose layers have other KV than the target's, in blocks of another size, is stored with it."""
    draft = shutil.copytree(TARGET, tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    (draft / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 1, "num_hidden_layers": 2}))
    weights = {
        name: tensor[:32].clone() if "k_proj" in name or "v_proj" in name else tensor
        for name, tensor in load_file(draft / "model.safetensors").items()
        if not name.startswith(("model.layers.2.", "model.layers.3."))
    }
    save_file(weights, draft / "model.safetensors", {"format": "pt"})
    check_tiers(tmp_path / "kv", without_speculation(), 2, method="draft_model", model=str(draft))


@pytest.mark.slow
def test_ngram_shares_the_cache(tmp_path: Path) -> None:
    """Drafts from the prompt's own tokens have no KV: what a server without speculation stored is a hit.

    In a process of its own: after n-gram's kernels of numba, vLLM 0.32 can't start another engine in the same one.
    """
    process = multiprocessing.get_context("spawn").Process(
        target=share_with_ngram, args=(tmp_path, without_speculation())
    )
    process.start()
    process.join(300)
    assert process.exitcode == 0


def share_with_ngram(tmp_path: Path, tokens: list[list[int]]) -> None:
    ngram = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}
    with speculating(tmp_path / "kv") as engine:
        assert [answer.tokens for answer in answers(engine)] == tokens
        engine.settle()
    with speculating(tmp_path / "kv", **ngram) as engine:
        found = answers(engine)
        assert [(answer.tokens, answer.cached) for answer in found] == [(one, CACHED) for one in tokens]
        assert accepted(found) > 0


@pytest.mark.slow
def test_texts_that_part_at_a_chunk(tmp_path: Path) -> None:
    """The head's KV of a chunk's last token is made with the token after it, which may differ in another text that
    begins with the same chunks. Tokens stay those of the engine without speculation."""
    with engine_alone(TARGET, **ENGINE) as plain:
        first, second = prompts(plain)
        mixed = first[:CACHED] + second[CACHED:]
        wanted = plain.ask(mixed, ANSWER).tokens
    with speculating(tmp_path / "kv", method="eagle", model=str(SPECULATIVE / "eagle")) as engine:
        engine.ask(first, ANSWER)
        engine.settle()
        engine.forget_gpu()
        hit = engine.ask(mixed, ANSWER)
        assert (hit.tokens, hit.cached) == (wanted, CACHED)
        assert engine.digests.wrong == 0


@pytest.mark.slow
def test_requests_that_run_together(tmp_path: Path) -> None:
    """Requests that load, compute, draft and reject drafts in the same steps each get their own answer; what they
    stored while decoding is right for the next turn."""
    with speculating(tmp_path / "kv", method="eagle", model=str(SPECULATIVE / "eagle")) as engine:
        encode = engine.llm.get_tokenizer().encode
        texts = [encode(rota(seed))[: 200 + 40 * seed] for seed in range(4)]
        alone = [engine.ask(text, 100).tokens for text in texts]
        engine.settle()
        engine.forget_gpu()
        together = engine.ask_all(texts, 100)
        assert [answer.tokens for answer in together] == alone
        turns = [text + tokens for text, tokens in zip(texts, alone, strict=True)]
        cold = [engine.ask(turn, 24, salt="computed").tokens for turn in turns]
        engine.settle()
        engine.forget_gpu()
        hits = [engine.ask(turn, 24) for turn in turns]
        assert [hit.tokens for hit in hits] == cold
        assert [hit.cached for hit in hits] == [(len(turn) - 1) // CHUNK * CHUNK for turn in turns]
        assert engine.digests.wrong == 0
