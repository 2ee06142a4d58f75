"""Ranks that hold the same KV: slots have one copy of it, with the names and the size that one rank's engine gives."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import ParallelConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, MLAAttentionSpec, UniformTypeKVCacheSpecs

from hotspan.engine.replicas import replicas_of
from hotspan.tiers.slab import sweep_dead_slabs
from kit.engine import CHUNK, rig
from kit.families.make import make_family
from kit.families.table import FAMILIES

SHARDS: dict[str, Any] = (
    {"max_tp_shards": 1} if any(each.name == "max_tp_shards" for each in dataclasses.fields(MLAAttentionSpec)) else {}
)
LATENT = MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16, **SHARDS)
HEADS = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=24, dtype=torch.bfloat16)
STATE = MambaSpec(block_size=16, shapes=((8,),), dtypes=(torch.float32,))
INDEXED = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": LATENT, "b": LATENT})
DRAFTED = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": LATENT, "b": HEADS})


def found(specs: list[Any], *, told: int | None = None, draft: object = None, **parallel: Any) -> int:
    options = {"tensor_parallel_size": 8, "distributed_executor_backend": "mp", "data_parallel_size_local": 1}
    config: Any = SimpleNamespace(parallel_config=ParallelConfig(**(options | parallel)), speculative_config=draft)
    groups: Any = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])
    if told is not None:
        groups.kv_tp_replicas = told
    return replicas_of(config, groups)


@pytest.mark.parametrize(
    ("specs", "replicas"),
    [([LATENT], 8), ([LATENT, LATENT], 8), ([INDEXED], 8), ([HEADS], 1), ([LATENT, STATE], 1), ([DRAFTED], 1), ([], 1)],
    ids=["latents", "two groups", "with an indexer", "heads", "states beside", "a draft's heads beside", "nothing"],
)
def test_only_latents_are_the_same_on_all_ranks(specs: list[Any], replicas: int) -> None:
    """All layers of all groups are latents, or each rank has a part of its own."""
    assert found(specs) == replicas


def test_the_engine_knows_better() -> None:
    """From vLLM 0.32 on its own count is taken, as of ranks in pairs; before, a draft model's layers may be hidden."""
    assert found([HEADS], told=2) == 2 and found([LATENT], told=1) == 1
    assert found([LATENT], draft=object()) == 1 and found([LATENT], draft=object(), told=8) == 8


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_parallel_size": 2},
        {"decode_context_parallel_size": 2},
        {"nnodes": 2},
        {"distributed_executor_backend": "ray"},
        {"distributed_executor_backend": "external_launcher"},
        {"tensor_parallel_size": 1},
    ],
    ids=str,
)
def test_other_ranks_have_parts_of_their_own(parallel: dict[str, Any]) -> None:
    """Ranks with other layers or tokens, or perhaps on another host, share nothing."""
    assert found([LATENT], **parallel) == 1


@pytest.fixture(scope="module")
def latent_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[str, Any]]]:
    (family,) = (each for each in FAMILIES if each.name == "DeepSeek-V2")
    directory = make_family(family, tmp_path_factory.mktemp("latents") / "model", tiny_model)
    yield (
        directory,
        {
            "dtype": family.dtype,
            "block_size": None,
            "num_gpu_blocks_override": None,
            "kv_cache_memory_bytes": 1 << 26,
        },
    )


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_another_number_of_ranks_finds_it(
    latent_model: tuple[Path, dict[str, Any]], tmp_path: Path, order: tuple[int, int]
) -> None:
    """What an engine of one rank left on disk is a hit for one of two, and the other way round, in slots of one size;
    the answer is the one that the other engine gave."""
    model, options = latent_model
    sizes, answers = [], []
    for ranks in order:
        sweep_dead_slabs()
        with rig(model, disk=tmp_path / "kv", tensor_parallel_size=ranks, **options) as engine:
            sizes.append(engine.cache.ram.slab.slot_bytes)
            prompt = engine.text(1, 2900)
            answer = engine.ask(prompt, 12)
            assert answer.cached == (2900 // CHUNK * CHUNK if answers else 0)
            answers.append(answer.tokens)
            engine.settle()
            engine.forget_gpu()
            assert engine.ask(prompt, 12).cached == 2900 // CHUNK * CHUNK
            engine.cache.check()
    assert sizes[0] == sizes[1] and answers[0] == answers[1]
    assert sweep_dead_slabs() == 0
