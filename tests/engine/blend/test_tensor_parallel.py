"""Blending in two tensor-parallel workers, each of which has half of the heads."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group

from hotspan.engine.blend import admission
from hotspan.tiers.slab import sweep_dead_slabs
from kit.engine import Rig

from .engine import WINDOW, Blended, Library, ask, blending, of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,  # as all engines of blending
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two ranks need two cores"),
]

ROUNDING = 1e-3
EVERYTHING = {"mode": "query", "recompute_ratio": 1.0}


def break_loads(worker: Any, rank: int) -> None:
    """From now on this rank can't load windows."""
    if torch.distributed.get_rank() == rank:
        get_kv_transfer_group()._blends._slot = lambda _: bytes(0)[1]


def on_workers(engine: Rig, function: Any, *given: Any) -> None:
    engine.llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(function, args=given)


def is_close(one: Blended, other: Blended) -> bool:
    """The same answer, but for rounding."""
    off = max(abs(mine - others) for mine, others in zip(one.logprobs, other.logprobs, strict=True))
    return one.tokens == other.tokens and off < ROUNDING


def test_two_workers_blend_as_one(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They store their halves of windows, choose the same tokens as one worker does, and give its answers; computing
    all of it again gives the prefill's. Where one of them fails, the request is computed in full."""
    plan = admission.plan_spans  # blends also what saves nothing
    monkeypatch.setattr(admission, "plan_spans", lambda *given, **named: plan(*given[:4], 0.0, **named))
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # to break a worker from here
    answers: dict[int, list[Blended]] = {}
    for workers in (1, 2):
        sweep_dead_slabs()
        with blending(tiny_model, tensor_parallel_size=workers) as engine:
            library = Library(engine, 1000, 3)
            library.learn()
            prompt = library.prompt(2, 1, 0)

            def answered(blend: Any, prompt: list[int] = prompt, engine: Rig = engine) -> Blended:
                engine.settle()
                engine.forget_gpu()
                return ask(engine, prompt, blend=blend, no_store=not blend)[0]

            parts = [{"mode": mode} for mode in ("first_k", "deviation", "query")]
            answers[workers] = [answered(blend) for blend in (False, EVERYTHING, *parts)]
            full, everything, *partly = answers[workers]
            assert everything.blend is not None and everything.blend["reused"] >= 5 * WINDOW
            assert is_close(everything, full)
            assert all(each.blend and 0 < each.blend["recomputed"] < each.blend["reused"] for each in partly)
            if workers == 2:
                on_workers(engine, break_loads, 1)
                failed = answered(EVERYTHING)
                assert failed.blend is None and is_close(failed, full) and of(engine).off is None
    for one, two in zip(answers[1], answers[2], strict=True):
        assert is_close(one, two) and one.blend == two.blend
