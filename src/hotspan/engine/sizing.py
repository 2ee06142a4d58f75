"""The tiers of an engine for which nobody named any: chosen from the machine and from what the engine was told."""

import contextlib
from argparse import Namespace
from dataclasses import replace

from vllm.platforms import current_platform

from hotspan.config.settings import CacheSettings, DiskSettings, L2Settings
from hotspan.core.errors import ConfigError
from hotspan.plan.host import Host
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import TierPlan, choose_tiers
from hotspan.plan.weights import model_directory, weights_bytes


def plan_engine(arguments: Namespace, host: Host) -> TierPlan:
    """The tiers for the engine of these arguments; data-parallel replicas have one plan each.

    Mutates: `arguments`: a CPU engine for which nobody said so gets the pool of the plan.
    """
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
    )
    if plan.engine_pool_bytes is not None and plan.ram_bytes:
        arguments.kv_cache_memory_bytes = plan.engine_pool_bytes
    return plan


def planned_settings(settings: CacheSettings, plan: TierPlan) -> CacheSettings | None:
    """The settings with the tiers of the plan; None if there is no room for any."""
    if not plan.ram_bytes:
        return None
    settings = replace(settings, ram_bytes=plan.ram_bytes, disk=None, l2=None)
    if settings.persistence == "none":
        return settings
    disk = None if plan.disk is None else DiskSettings(str(plan.disk.directory), plan.disk.bytes)
    return replace(settings, disk=disk, l2=None if plan.l2 is None else L2Settings(plan.l2))
