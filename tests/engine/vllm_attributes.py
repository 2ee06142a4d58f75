"""Attributes of vLLM's objects that hotspan reads or sets. Most exist in instances alone: only sources tell of them."""

from typing import NamedTuple

_ALWAYS = (0, 0)
_NEVER = (99, 0)
_BASE = "vllm.v1.kv_offload.base"
_CONFIG = "vllm.v1.kv_offload.config"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_OFFLOADING = f"{_CONNECTOR}.offloading"
_ASYNC = "vllm.v1.engine.async_llm"
_CLIENT = "vllm.v1.engine.core_client"
_EVENTS = "vllm.distributed.kv_events"
_POOL = "vllm.v1.core.block_pool"
_OUTPUT = "vllm.v1.core.sched.output"
_CACHE = "vllm.v1.kv_cache_interface"
_MODELS = "vllm.entrypoints.openai.models.serving"


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
    Attributes(f"{_OFFLOADING}.common", "OffloadingWorkerMetadata", ("completed_jobs", "transfer_stats")),
    Attributes(
        f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler", ("manager", "_jobs", "_current_batch_jobs_to_flush")
    ),
    Attributes(f"{_OFFLOADING}.scheduler", "TransferJobStatus", ("pending_count",)),
    Attributes(f"{_OFFLOADING}.scheduler", "OffloadingConnectorScheduler", ("_req_status",), before=(0, 30)),
    Attributes(f"{_OFFLOADING}.scheduler", "RequestOffloadState", ("max_offload_tokens",), before=(0, 30)),
    Attributes(
        f"{_OFFLOADING}.scheduler",
        "OffloadingConnectorScheduler",
        ("config", "_req_status", "_chunks_being_loaded", "_current_batch_allocated_block_ids"),
        since=(0, 32),
    ),
    Attributes(f"{_OFFLOADING}.scheduler", "RequestOffloadState", ("req_context", "transfer_jobs"), since=(0, 32)),
    Attributes(f"{_OFFLOADING}.scheduler", "TransferJobStatus", ("keys",), since=(0, 32)),
    Attributes("vllm.v1.core.sched.output", "SchedulerOutput", ("has_sync_kv_loads",), since=(0, 32)),
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
            "resumable",
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
    Attributes("vllm.v1.engine.core", "EngineCore", ("scheduler", "step_fn", "batch_queue")),
    Attributes("vllm.v1.engine.core", "EngineCoreProc", ("input_queue",)),
    Attributes("vllm.v1.core.sched.scheduler", "Scheduler", ("connector", "requests")),
    Attributes(
        "vllm.v1.core.sched.scheduler",
        "Scheduler",
        ("finished_recving_kv_req_ids", "failed_recving_kv_req_ids", "skipped_waiting"),
        before=(0, 31),
    ),
    Attributes("vllm.lora.request", "LoRARequest", first=("lora_name", "lora_int_id", "lora_path")),
    Attributes("vllm.v1.engine", "EngineCoreRequest", ("cache_salt", "sampling_params")),
    Attributes("vllm.sampling_params", "SamplingParams", ("extra_args",)),
    Attributes("vllm.outputs", "RequestOutput", ("num_cached_tokens", "outputs", "request_id")),
    Attributes("vllm.outputs", "CompletionOutput", ("index",)),
    Attributes("vllm.outputs", "CompletionOutput", ("spec_decode_metrics",), since=(0, 32)),
    Attributes("vllm.v1.metrics.stats", "RequestSpecDecodeMetrics", ("histogram", "num_draft_tokens"), since=(0, 32)),
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
    Attributes(_ASYNC, "AsyncLLM", ("output_processor",)),
    Attributes(_CLIENT, "AsyncMPClient", ("core_engines",)),
    Attributes(_MODELS, "OpenAIServingModels", ("lora_requests", "lora_id_counter", "registry", "base_model_paths")),
    Attributes("vllm.renderers.base", "BaseRenderer", ("tokenizer", "_executor", "_process_multimodal_async")),
    Attributes("vllm.renderers.base", "BaseRenderer", ("_mm_executor",), since=(0, 29)),
    Attributes("vllm.multimodal.processing.inputs", "ProcessorInputs", ("mm_uuid_items",)),
)
