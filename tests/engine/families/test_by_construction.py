"""Layouts of models that the CPU build can't run: vLLM's own blocks for their layers, through our copies, by bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SparseCacheRole,
)
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.worker.utils import allocate_kv_cache

from hotspan.core.errors import ConfigError
from hotspan.engine.connector import _blocks_per_chunk, _check_groups
from tests.engine.harness.core import BLOCK, CHUNK, Core, core
from tests.engine.harness.runner import KnownBytes

LAYERS = 3


def deepseek_v32(layer: int) -> dict[str, KVCacheSpec]:
    """Sparse attention's two caches: latents of 656 bytes a token, and the indexer's keys of 132."""
    latent = MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=576,
        dtype=torch.uint8,
        cache_dtype_str="fp8_ds_mla",
        state_content_bytes=656,
    )
    index = MLAAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        cache_role=SparseCacheRole.INDEXER,
    )
    return {f"model.layers.{layer}.self_attn.attn": latent, f"model.layers.{layer}.self_attn.indexer.k_cache": index}


class Blocks(KnownBytes):
    """An executor that has the blocks of `specs`, and computes nothing."""

    specs: ClassVar[dict[str, KVCacheSpec]] = {}

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        return dict(self.specs)

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        (self.config,) = configs
        layout = self.cache_config.get_resolved_kv_cache_layout()
        self.caches = allocate_kv_cache(self.config, torch.device("cpu"), layout)
        self.connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, self.config)
        self.connector.register_kv_caches(self.caches)


@contextmanager
def blocks_of(model: Path, specs: dict[str, KVCacheSpec]) -> Iterator[Core]:
    class Chosen(Blocks):
        pass

    Chosen.specs = specs
    with core(model, runner=Chosen) as running:
        yield running


@pytest.mark.parametrize("layer_specs", [deepseek_v32])
def test_blocks_come_back_whole(layer_specs: Any, tiny_model: Path) -> None:
    """Each layer's part of a block is stored, and loaded into another block, and nothing else is written."""
    specs = {name: spec for layer in range(LAYERS) for name, spec in layer_specs(layer).items()}
    with blocks_of(tiny_model, specs) as running:
        runner: Any = running.runner
        caches: dict[str, torch.Tensor] = runner.caches
        assert caches.keys() == specs.keys()
        worker = runner.connector.connector_worker.worker
        for number, cache in enumerate(caches.values()):
            chance = torch.Generator().manual_seed(number)
            cache.copy_(torch.randint(0, 255, cache.shape, generator=chance, dtype=torch.uint8).view(cache.dtype))
        before = {name: cache.clone() for name, cache in caches.items()}
        groups = len(runner.config.kv_cache_groups)
        per_chunk = worker._blocks_per_chunk
        stored, loaded = list(range(1, 1 + per_chunk)), list(range(20, 20 + per_chunk))
        slots = CPULoadStoreSpec(list(range(groups)))
        for job, (blocks, submit) in enumerate(((stored, worker.submit_store), (loaded, worker.submit_load))):
            engine = GPULoadStoreSpec(blocks * groups, group_sizes=[per_chunk] * groups, block_indices=[0] * groups)
            assert submit(job, *((engine, slots) if submit == worker.submit_store else (slots, engine)))
            worker.wait({job})
        assert len(worker.get_finished()) == 2
        for name, cache in caches.items():
            expected = before[name]
            expected[loaded] = expected[stored]
            assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)), name


def attention(size: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=8, dtype=torch.float32)


def states(size: int, mode: str) -> MambaSpec:
    return MambaSpec(block_size=size, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


def groups(*specs: KVCacheSpec) -> KVCacheConfig:
    return KVCacheConfig(1, [], [KVCacheGroupSpec([str(n)], spec) for n, spec in enumerate(specs)])


def test_chunks_of_a_hybrid_are_blocks() -> None:
    """States are kept at the ends of whole blocks of a prompt: a longer chunk that ends elsewhere would never hit."""
    assert _blocks_per_chunk(CHUNK, groups(attention(16), attention(64))) == CHUNK // 64
    assert _blocks_per_chunk(CHUNK, groups(attention(16), states(16, "align"))) == 1
    assert _blocks_per_chunk(CHUNK, groups(attention(512))) == 1


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        ((), "nothing of a text"),
        ((states(16, "align"),), "nothing of a text"),
        (
            (EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32),),
            "nothing of a text",
        ),
        ((attention(16), states(4096, "none")), "--enable-prefix-caching"),
    ],
)
def test_a_model_without_use_for_tiers_is_refused_with_the_reason(specs: tuple[KVCacheSpec, ...], reason: str) -> None:
    """An engine that somebody else starts with hotspan in it ends with a sentence, not in vLLM's assertions."""
    with pytest.raises(ConfigError, match=reason):
        _check_groups(groups(*specs))
    _check_groups(groups(attention(16), states(16, "align")))
