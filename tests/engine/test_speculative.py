"""Speculative decoding through the cache: the draft model's KV is stored, found and loaded with the target's."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.speculators import rota

from .rig import SPECULATIVE, Answer, Rig, engine_alone, rig

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
