"""Which ranks hold the same KV, so that a slot has one copy of it: one rank stores, all of them load.

A latent (MLA) has one head, and every tensor-parallel rank computes and keeps all of it. KV heads that are fewer than
the ranks are copied as well, but vLLM's layers do not tell so up to 0.33 (`max_tp_shards` is set for latents alone):
each rank's copy of them is stored.
"""

from collections.abc import Iterator
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig, MLAAttentionSpec

from hotspan.engine.hosts import nodes

REPLICAS = "hotspan_replicas"
"""In the connector's extra config: how many ranks, one after the other, hold the same KV."""


def replicas_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """How many ranks, one after the other, hold the same KV and share this host's slots; 1 if each has its own.

    Only tensor parallelism copies KV. Ranks that may be on several hosts have slabs of their own.
    """
    parallel = vllm_config.parallel_config
    ranks: int = parallel.tensor_parallel_size
    contexts = parallel.prefill_context_parallel_size * parallel.decode_context_parallel_size
    if parallel.world_size != ranks or contexts != 1 or not share_a_host(parallel):
        return 1
    told: int | None = getattr(kv_cache_config, "kv_tp_replicas", None)
    if told is not None:
        return told
    # A draft model's layers may be hidden behind a latent in the scheduler's configuration of a group.
    specs = list(_specs(kv_cache_config))
    is_latent = all(isinstance(spec, MLAAttentionSpec) for spec in specs)
    return ranks if specs and is_latent and vllm_config.speculative_config is None else 1


def share_a_host(parallel: Any) -> bool:
    """Whether all ranks are certain to be on the scheduler's host. parallel: vLLM's ParallelConfig."""
    return nodes(parallel) == 1 and parallel.distributed_executor_backend in ("mp", "uni", None)


def _specs(kv_cache_config: KVCacheConfig) -> Iterator[Any]:
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        yield from getattr(spec, "kv_cache_specs", {"": spec}).values()
