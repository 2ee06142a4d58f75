"""The tiers of an engine for which nobody named any: chosen from the machine and from what the engine was told."""

import contextlib
from argparse import Namespace
from dataclasses import replace

from vllm.platforms import current_platform

from hotspan.config.settings import CacheSettings, with_named
from hotspan.core.errors import ConfigError
from hotspan.plan.host import Host
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import Extent, TierPlan, choose_tiers
from hotspan.plan.weights import model_directory, weights_bytes


def plan_engine(
    arguments: Namespace, host: Host, settings: CacheSettings | None = None, extent: Extent = Extent.ALL
) -> TierPlan:
    """The tiers for the engine of these arguments; data-parallel replicas have one plan each.

    settings: what was named, which the plan has as it is.
    Mutates: `arguments`: a CPU engine for which nobody said so gets the pool of the plan.
    """
    if settings is not None and host.memory is not None and current_platform.is_cpu():
        # The engine's own pool is part of what a RAM tier leaves that was named.
        left = host.memory.bytes - settings.ram_bytes * arguments.data_parallel_size
        host = replace(host, memory=replace(host.memory, bytes=max(0, left)))
    shape, weights = None, 0
    with contextlib.suppress(ConfigError, OSError):  # a model that is not here yet: the machine alone decides
        directory = model_directory(arguments.model)
        weights = weights_bytes(directory)
        shape = ModelShape.from_config(
            directory,
            kv_dtype=arguments.kv_cache_dtype,
            dtype=str(arguments.dtype),
            tensor_parallel=arguments.tensor_parallel_size,
        )
        if (arguments.max_model_len or 0) > 0:
            shape = replace(shape, max_tokens=arguments.max_model_len)
    plan = choose_tiers(
        host,
        shape,
        workers=arguments.data_parallel_size,
        is_cpu_engine=current_platform.is_cpu(),
        weights_bytes=weights,
        engine_pool_bytes=arguments.kv_cache_memory_bytes,
        requests=arguments.max_num_seqs,
        extent=extent,
    )
    if settings is not None:
        plan = with_named(plan, settings)
    if plan.engine_pool_bytes is not None and plan.ram_bytes:
        arguments.kv_cache_memory_bytes = plan.engine_pool_bytes
    return plan
