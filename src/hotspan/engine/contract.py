"""What hotspan relies on inside vLLM, as data: methods with their parameters, and attributes that it reads or sets.

`compat.check_engine` looks at the methods of the vLLM that runs; tests/engine/test_compat.py looks for all of it, and
for whatever else engine/ imports, in the sources of each release. Nothing of vLLM is imported here.
"""

from collections.abc import Iterable
from typing import NamedTuple

_ALWAYS = (0, 0)
_NEVER = (99, 0)

_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTOR}.offloading"
_CUDA = "vllm.v1.kv_offload.cpu.gpu_worker"
_ASYNC = "vllm.v1.engine.async_llm"
_CLIENT = "vllm.v1.engine.core_client"
_EVENTS = "vllm.distributed.kv_events"
_POOL = "vllm.v1.core.block_pool"
_OUTPUT = "vllm.v1.core.sched.output"
_CACHE = "vllm.v1.kv_cache_interface"
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


class Attributes(NamedTuple):
    """What instances of a class have, of its own or of its bases. first: these are its first fields, in this order."""

    module: str
    name: str
    attributes: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    since: tuple[int, int] = _ALWAYS
    before: tuple[int, int] = _NEVER

    def is_in(self, engine: tuple[int, int]) -> bool:
        """Whether hotspan relies on it in this release."""
        return self.since <= engine < self.before


def _methods(module: str, owner: str, methods: Iterable[tuple[str, str]]) -> tuple[Method, ...]:
    return tuple(Method(module, f"{owner}.{name}", tuple(parameters.split())) for name, parameters in methods)


METHODS: tuple[Method, ...] = (
    *_methods(
        _BASE,
        "OffloadingManager",
        (
            ("lookup", "key req_context"),
            ("prepare_load", "keys req_context"),
            ("complete_load", "keys req_context"),
            ("prepare_store", "keys req_context"),
            ("complete_store", "keys req_context success"),
            ("on_new_request", "req_context"),
            ("on_request_finished", "req_context"),
            ("on_schedule_end", "context"),
            ("get_stats", ""),
            ("reset_cache", ""),
            ("shutdown", ""),
        ),
    ),
    Method(_BASE, "OffloadingManager.get_load_source", ("key", "req_context"), since=(0, 32)),
    Method(_BASE, "ReqContext.set_state", ("val",), since=(0, 27)),
    Method(_BASE, "ReqContext.get_state", ("cls",), since=(0, 27)),
    *_methods(
        _BASE,
        "OffloadingWorker",
        (
            ("submit_store", "job_id src_spec dst_spec"),
            ("submit_load", "job_id src_spec dst_spec"),
            ("get_finished", ""),
            ("wait", "job_ids"),
            ("shutdown", ""),
        ),
    ),
    *_methods(
        _BASE,
        "OffloadingSpec",
        (
            ("__init__", "config"),
            ("build_metric_definitions", "extra_config"),
            ("get_manager", ""),
            ("get_worker", "kv_caches"),
        ),
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
    *_methods(
        f"{_CONNECTOR}.offloading_connector",
        "OffloadingConnector",
        (
            ("__init__", "vllm_config role kv_cache_config"),
            ("on_new_request", "request"),
            ("get_num_new_matched_tokens", "request num_computed_tokens"),
            ("update_state_after_alloc", "request blocks num_external_tokens"),
            ("build_connector_meta", "scheduler_output"),
            ("update_connector_output", "connector_output"),
            ("request_finished", "request block_ids"),
            ("request_finished_all_groups", "request block_ids"),
            ("bind_gpu_block_pool", "gpu_block_pool"),
            ("get_finished", "finished_req_ids"),
            ("get_kv_connector_stats", ""),
            ("has_pending_push_work", ""),
            ("take_events", ""),
            ("reset_cache", ""),
            ("shutdown", ""),
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
    Method("vllm.v1.engine.core", "EngineCore.add_lora", ("lora_request",)),
    Method("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ("usage_context",)),
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
"""What hotspan calls or overrides. An engine that starts looks at the modules that its process has loaded."""

ATTRIBUTES: tuple[Attributes, ...] = (
    Attributes(_CONFIG, "OffloadingConfig", ("groups", "worker_kv_bytes_per_block", "engine_id", "parallel")),
    Attributes(_CONFIG, "OffloadingGroupConfig", ("tokens_per_block",)),
    Attributes(_CONFIG, "OffloadingGroupConfig", ("group_id",), since=(0, 30)),
    Attributes(_CONFIG, "OffloadingParallelConfig", ("world_size", "rank")),
    Attributes(_BASE, "OffloadingSpec", ("config", "extra_config", "blocks_per_chunk", "tokens_per_hash")),
    Attributes(_BASE, "GPULoadStoreSpec", ("block_ids", "group_sizes", "block_indices")),
    Attributes("vllm.v1.kv_offload.cpu.common", "CPULoadStoreSpec", ("block_ids",)),
    Attributes(_BASE, "CanonicalKVCaches", ("tensors", "group_data_refs")),
    Attributes(_BASE, "CanonicalKVCacheTensor", ("tensor", "page_size_bytes")),
    Attributes(_BASE, "CanonicalKVCacheRef", ("tensor_idx", "page_size_bytes")),
    Attributes(_BASE, "TransferResult", first=("job_id", "success", "transfer_size", "transfer_time")),
    Attributes(_BASE, "PrepareStoreOutput", ("keys_to_store", "store_spec", "evicted_keys")),
    Attributes(_BASE, "ReqContext", ("req_id",)),
    Attributes(_BASE, "ScheduleEndContext", ("new_req_ids",)),
    Attributes(_BASE, "LookupResult", ("MISS", "HIT", "RETRY")),
    Attributes(
        "vllm.v1.metrics.cache_hit_source", "CacheHitSource", ("HOST", "DISK", "EXTERNAL_UNSPECIFIED"), since=(0, 32)
    ),
    Attributes(_BASE, "OffloadingCounterMetadata", first=("documentation", "labelnames")),
    Attributes(_BASE, "OffloadingGaugeMetadata", first=("documentation", "labelnames")),
    Attributes(_BASE, "OffloadingHistogramMetadata", first=("documentation", "labelnames", "buckets")),
    Attributes(
        f"{_OFFLOADING}.common", "OffloadingConnectorMetadata", first=("load_jobs", "store_jobs", "jobs_to_flush")
    ),
    Attributes(f"{_OFFLOADING}.common", "OffloadingWorkerMetadata", ("completed_jobs",)),
    Attributes(f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler", ("manager", "_jobs")),
    Attributes(f"{_OFFLOADING}.scheduler", "TransferJobStatus", ("pending_count",)),
    Attributes(f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler", ("_req_status",), before=(0, 30)),
    Attributes(f"{_OFFLOADING}.scheduler", "RequestOffloadState", ("max_offload_tokens",), before=(0, 30)),
    Attributes(f"{_OFFLOADING}.worker", "OffloadingConnectorWorker", ("worker",)),
    Attributes(
        f"{_CONNECTOR}.offloading_connector",
        "OffloadingConnector",
        ("connector_scheduler", "connector_worker", "_vllm_config", "_kv_cache_config", "_connector_metadata"),
    ),
    Attributes(_POOL, "BlockPool", ("num_gpu_blocks", "cached_block_hash_to_block")),
    Attributes("vllm.v1.core.kv_cache_utils", "KVCacheBlock", ("block_id",)),
    Attributes(
        "vllm.v1.request",
        "Request",
        (
            *("request_id", "block_hashes", "num_prompt_tokens", "all_token_ids"),
            *("lora_request", "kv_transfer_params", "cache_salt", "num_tokens", "num_computed_tokens", "mm_features"),
        ),
    ),
    Attributes(
        _OUTPUT,
        "SchedulerOutput",
        ("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
    ),
    Attributes(_OUTPUT, "NewRequestData", ("req_id", "num_computed_tokens")),
    Attributes(_OUTPUT, "CachedRequestData", ("req_ids", "num_computed_tokens")),
    Attributes("vllm.v1.outputs", "KVConnectorOutput", ("kv_connector_worker_meta",)),
    Attributes(_CACHE, "KVCacheConfig", ("kv_cache_groups",)),
    Attributes(_CACHE, "KVCacheConfig", ("kv_cache_layout",), since=(0, 29)),
    Attributes(_CACHE, "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Attributes(_CACHE, "FullAttentionSpec", ("block_size",)),
    Attributes(
        _EVENTS,
        "BlockStored",
        ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    ),
    Attributes(_EVENTS, "BlockRemoved", first=("block_hashes", "medium")),
    Attributes("vllm.v1.engine.core", "EngineCore", ("scheduler",)),
    Attributes("vllm.v1.engine.core", "EngineCoreProc", ("input_queue",)),
    Attributes("vllm.v1.core.sched.scheduler", "Scheduler", ("connector",)),
    Attributes("vllm.lora.request", "LoRARequest", first=("lora_name", "lora_int_id", "lora_path")),
    Attributes("vllm.v1.engine", "EngineCoreRequest", ("cache_salt", "sampling_params")),
    Attributes("vllm.sampling_params", "SamplingParams", ("extra_args",)),
    Attributes("vllm.outputs", "RequestOutput", ("num_cached_tokens",)),
    Attributes(
        "vllm.config",
        "VllmConfig",
        (
            *("model_config", "cache_config", "parallel_config", "scheduler_config", "load_config", "lora_config"),
            *("speculative_config", "kv_transfer_config", "kv_events_config", "shutdown_timeout", "attention_config"),
        ),
    ),
    Attributes("vllm.config", "VllmConfig", ("num_hash_lookahead_tokens",), since=(0, 33)),
    Attributes(
        "vllm.config",
        "KVTransferConfig",
        (
            *("kv_connector", "kv_connector_module_path", "kv_role", "kv_load_failure_policy"),
            "kv_connector_extra_config",
        ),
    ),
    Attributes("vllm.config", "KVEventsConfig", ("enable_kv_cache_events",)),
    Attributes(_EVENTS, "EventPublisherFactory", ("_registry",)),
    Attributes(_EVENTS, "ZmqEventPublisher", ("_ctx", "_pub", "_replay", "_endpoint", "_replay_endpoint", "_hwm")),
    Attributes(
        "vllm.config",
        "ParallelConfig",
        (
            *("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"),
            *("decode_context_parallel_size", "enable_expert_parallel", "data_parallel_index", "data_parallel_size"),
        ),
    ),
    Attributes("vllm.config", "CacheConfig", ("cache_dtype", "prefix_caching_hash_algo")),
    Attributes("vllm.config", "CacheConfig", ("kv_cache_layout",), since=(0, 29)),
    Attributes("vllm.config", "SchedulerConfig", ("max_num_batched_tokens",)),
    Attributes(
        "vllm.config",
        "ModelConfig",
        ("model", "revision", "dtype", "quantization", "seed", "hf_config", "max_model_len", "runner_type"),
    ),
    Attributes("vllm.config", "LoadConfig", ("load_format",)),
    Attributes("vllm.config", "SpeculativeConfig", ("model", "revision", "draft_model_config")),
    Attributes("vllm.config.lora", "LoRAConfig", ("max_loras", "max_lora_rank")),
    Attributes(
        "vllm.engine.arg_utils",
        "AsyncEngineArgs",
        (
            *("model", "dtype", "max_model_len", "tensor_parallel_size", "data_parallel_size", "kv_cache_dtype"),
            *("gpu_memory_utilization", "kv_cache_memory_bytes", "kv_transfer_config", "prefix_caching_hash_algo"),
            *("enable_log_requests", "disable_log_stats", "aggregate_engine_logging"),
        ),
    ),
    Attributes(_ASYNC, "AsyncLLM", ("engine_core", "model_config", "vllm_config", "renderer", "errored", "is_running")),
    Attributes(_CLIENT, "AsyncMPClient", ("core_engines",)),
    Attributes(_MODELS, "OpenAIServingModels", ("lora_requests", "lora_id_counter", "registry", "base_model_paths")),
    Attributes("vllm.renderers.base", "BaseRenderer", ("tokenizer", "_executor", "_process_multimodal_async")),
    Attributes("vllm.renderers.base", "BaseRenderer", ("_mm_executor",), since=(0, 29)),
    Attributes("vllm.multimodal.processing.inputs", "ProcessorInputs", ("mm_uuid_items",)),
)
"""What hotspan reads or sets. Only sources tell: most of it exists in instances alone."""
