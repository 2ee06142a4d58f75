"""The plan for an engine, from its own arguments: what it takes itself, and what was named, is not given out twice."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from hotspan.config.settings import CacheOptions, CacheSettings
from hotspan.core.types import GIB, MIB
from hotspan.engine import arguments as engine_arguments
from hotspan.engine.arguments import plan_engine
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import Extent, TierPlan

from . import models
from .models import drive, machine

AUTO = CacheOptions(ram_gib=None).settings()


@pytest.fixture(params=[True, False], ids=["cpu", "gpu"])
def is_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Where the engine computes."""

    class Platform:
        @staticmethod
        def is_cpu() -> bool:
            return bool(request.param)

    monkeypatch.setattr(engine_arguments, "current_platform", Platform)
    return bool(request.param)


def arguments(directory: Path, **others: object) -> Namespace:
    told = {"model": str(directory), "kv_cache_dtype": "auto", "dtype": "auto", "tensor_parallel_size": 1}
    told |= {"data_parallel_size": 1, "max_model_len": None, "kv_cache_memory_bytes": None, "max_num_seqs": None}
    told["speculative_config"] = None
    return Namespace(**(told | others))


def planned(
    directory: Path, told: CacheSettings, memory_gib: float = 100, **others: object
) -> tuple[TierPlan, int | None]:
    """The plan on a machine with that memory, and the pool that the engine is given."""
    given = arguments(directory, **others)
    plan = plan_engine(given, machine(memory_gib, disks=(drive(500),)), told)
    return plan, given.kv_cache_memory_bytes


def test_tiers_and_pool(tmp_path: Path, is_cpu: bool) -> None:
    """A CPU engine is given the pool that the plan has for it; a GPU engine's memory is its own."""
    plan, pool = planned(tmp_path, AUTO)
    assert plan.disk is not None and plan.disk.bytes == 400 * GIB
    if is_cpu:
        assert pool == plan.engine_pool_bytes and pool is not None
        assert plan.ram_bytes == pytest.approx(40 * GIB, abs=MIB) == pool
    else:
        assert pool is None and plan.ram_bytes == pytest.approx(80 * GIB, abs=MIB)
    _, pool = planned(tmp_path, AUTO, kv_cache_memory_bytes=5 * GIB)
    assert pool == 5 * GIB


def test_modest_tiers(tmp_path: Path, is_cpu: bool) -> None:
    """Where nobody asked, the engine's --max-num-seqs and length limit the tier, and a CPU engine's pool likewise."""
    (tmp_path / "config.json").write_text(json.dumps(models.QWEN_7B))
    given = arguments(tmp_path, max_model_len=4096, max_num_seqs=8)
    plan = plan_engine(given, machine(100, disks=(drive(500),)), AUTO, Extent.MODEST)
    used = 1.1 * 8 * ModelShape.from_config(models.QWEN_7B).load_bytes(4096)
    assert plan.ram_bytes == pytest.approx(used, abs=MIB) and plan.disk is None
    assert given.kv_cache_memory_bytes == (pytest.approx(used, abs=MIB) if is_cpu else None)


def test_named_tiers(tmp_path: Path, is_cpu: bool) -> None:
    """A RAM tier that was named is in the plan as it is, and a CPU engine's pool is part of what it leaves."""
    told = replace(AUTO, ram_bytes=60 * GIB)
    plan, pool = planned(tmp_path, told)
    assert plan.ram_bytes == 60 * GIB and plan.disk is not None
    assert any(reason.what == "RAM" and reason.why == "as given" for reason in plan.reasons)
    assert (pool is not None and 10 * GIB < pool <= 32 * GIB) if is_cpu else pool is None
    _, shared = planned(tmp_path, replace(AUTO, ram_bytes=30 * GIB), data_parallel_size=2)
    assert shared is None or 2 * (shared + 30 * GIB) < 100 * GIB


@pytest.mark.parametrize("is_cpu", [False], indirect=True)
def test_the_engines_arguments_count(tmp_path: Path, is_cpu: bool) -> None:
    """The model's config with the arguments' KV dtype and degree says what a token keeps."""
    (tmp_path / "config.json").write_text(json.dumps(models.QWEN_7B))
    shape = ModelShape.from_config(models.QWEN_7B, kv_dtype="fp8")
    plan, _ = planned(tmp_path, AUTO, kv_cache_dtype="fp8")
    assert f"{shape.kv_bytes_per_token:,} bytes per token" in plan.reasons[0].value and not is_cpu
