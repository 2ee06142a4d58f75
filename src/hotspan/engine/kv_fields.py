"""What of vLLM's configuration and environment changes the bytes of KV: it is in the namespace (engine/identity.py).

What only changes the rounding of sums stays out: another kernel for the same function, other batches, graphs, fused
operations. The engine's own prefix cache mixes such KV, too, from one step to the next. What changes the function
(another type, other scales, other weights, what is quantized on the way) is in.

Fields are listed, by section: a part of VllmConfig, by its path. tests/engine/kv_rest.py gives the reason for every
other field, and a test fails when the installed vLLM has a field that is in neither. Fields that a release does not
have are skipped.

Of the environment all variables that are set are in, except those that are listed: some quantize activations
(VLLM_MARLIN_INPUT_DTYPE, VLLM_CPU_INT4_W4A8), some order the bytes of a block another way (VLLM_SSM_CONV_STATE_LAYOUT,
VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT) or the layers of the ranks (VLLM_PP_LAYER_PARTITION). A variable that a later vLLM
adds is in the namespace until somebody has read what it does.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from vllm import envs

KV: Final[Mapping[str, str]] = MappingProxyType(
    {
        # additional_config: what a platform's plugin makes of it is not known here.
        "": "additional_config",
        # max_model_len: LongRoPE takes its factors by it, Llama 4 its temperatures, others the size of their tables.
        "model_config": """
            runner convert dtype seed max_model_len spec_target_max_model_len quantization quantization_config
            disable_sliding_window model_class_overrides model_impl trust_remote_code revision code_revision
            model_weights
        """,
        "model_config.multimodal_config": """
            media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_fp8_scale_save_margin video_pruning_rate video_pruning_method allow_missing_mm_embeddings
            mm_ipc_gpu_memory_gb
        """,
        "cache_config": """
            cache_dtype sliding_window kv_cache_dtype_skip_layers mamba_page_size_padded skip_page_size_padded
            mamba_block_size mamba_cache_dtype mamba_ssm_cache_dtype mamba_cache_mode
            enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm use_kda_recoverssm
            kv_sharing_fast_prefill swa_bounded_replay
        """,
        # all2all_backend: some send activations in eight bits.
        "parallel_config": """
            tensor_parallel_size pipeline_parallel_size prefill_context_parallel_size decode_context_parallel_size
            dcp_kv_cache_interleave_size cp_kv_cache_interleave_size enable_expert_parallel all2all_backend worker_cls
            worker_extension_cls
        """,
        # Both decide which tokens of a medium see each other where attention within it goes both ways.
        "scheduler_config": "disable_chunked_mm_input disable_hybrid_kv_cache_manager",
        "load_config": "load_format model_loader_extra_config ignore_patterns",
        "attention_config": """
            backend backend_per_kind flash_attn_version use_trtllm_attention disable_flashinfer_q_quantization
            mla_prefill_backend use_prefill_query_quantization indexer_kv_dtype indexer_sparse_logits hisparse_config
            use_non_causal sparse_mla_force_mqa minimax_m3_msa_decode_backend
        """,
        "mamba_config": "backend enable_stochastic_rounding stochastic_rounding_philox_rounds ssu_algorithm",
        # A backend of linear layers or experts may quantize activations where another one does not.
        "kernel_config": """
            ir_op_priority moe_backend sparse_indexer_topk_backend linear_backend linear_backend_per_quant
        """,
        # Which of an adapter's modules act, and in which type. What an adapter holds is in the names of its chunks.
        "lora_config": """
            lora_dtype target_modules default_mm_loras enable_tower_connector_lora enable_mixed_moe_lora_format
            enable_moe_shared_loras
        """,
        # A draft model's layers have KV in the same blocks. Nothing counts of methods without them (identity.py).
        "speculative_config": """
            method num_speculative_tokens draft_tensor_parallel_size tensor_parallel_size quantization
            moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision
            index_share_for_mtp_iteration disable_eagle_block_drop use_heterogeneous_vocab parallel_drafting
        """,
        "diffusion_config": "canvas_length max_denoising_steps",
    }
)

_VARIABLES_OUT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "hosts, ports, ranks and devices of this replica": """
            VLLM_HOST_IP VLLM_PORT VLLM_LOOPBACK_IP VLLM_RPC_BASE_PATH VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE
            VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_NIXL_SIDE_CHANNEL_HOST
            VLLM_NIXL_SIDE_CHANNEL_PORT VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST
            VLLM_EC_SIDE_CHANNEL_PORT VLLM_MOONCAKE_BOOTSTRAP_PORT MOONCAKE_PREFERRED_SEGMENT
            MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_RAY_BUNDLE_INDICES VLLM_RAY_PER_WORKER_GPUS
            VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_PROCESS_NAME_PREFIX VLLM_CPU_OMP_THREADS_BIND
            VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_SGL_KERNEL VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING
        """,
        "places of files and caches": """
            VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH
            VLLM_TUNED_CONFIG_FOLDER VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_DEBUG_DUMP_PATH VLLM_MEDIA_CACHE
            VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_COMPILE_CACHE_SAVE_FORMAT
            VLLM_DISABLE_COMPILE_CACHE VLLM_LORA_RESOLVER_CACHE_DIR VLLM_NCCL_SO_PATH VLLM_NCCL_INCLUDE_PATH CUDA_HOME
            LD_LIBRARY_PATH VLLM_CUDART_SO_PATH VLLM_RUST_FRONTEND_PATH VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME
        """,
        "secrets, and where bytes are fetched; they count as bytes": """
            S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_API_KEY VLLM_USE_MODELSCOPE
            VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_FETCH_MAX_RETRIES
            VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB
            VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        """,
        "logs, statistics, limits in time and of requests": """
            VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_COLOR
            VLLM_CONFIGURE_LOGGING VLLM_LOG_STATS_INTERVAL VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
            VLLM_DISABLE_LOG_LOGO VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_TRACE_FUNCTION VLLM_GC_DEBUG
            VLLM_DEBUG_MFU_METRICS VLLM_RINGBUFFER_WARNING_INTERVAL NO_COLOR FORCE_COLOR VLLM_NO_USAGE_STATS
            VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER VLLM_ENGINE_READY_TIMEOUT_S
            VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_HTTP_TIMEOUT_KEEP_ALIVE
            VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_MAX_N_SEQUENCES VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS
            VLLM_MAX_NUM_BAD_WORDS VLLM_SERVER_DEV_MODE VLLM_XGRAMMAR_CACHE_MB VLLM_V1_OUTPUT_PROC_CHUNK_SIZE
        """,
        "how it was built, and how much there is": """
            MAX_JOBS NVCC_THREADS VERBOSE CMAKE_BUILD_TYPE VLLM_USE_PRECOMPILED VLLM_CPU_KVCACHE_SPACE
            VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_SKIP_VERSION_SUFFIX
        """,
        "in by itself (engine/compat.py)": "VLLM_KV_CACHE_LAYOUT",
    }
)
_NAMES_OUT: Final = frozenset(name for names in _VARIABLES_OUT.values() for name in names.split())


def kv_environment(surroundings: Mapping[str, str]) -> dict[str, str]:
    """The variables of an environment that are part of the namespace, by name."""
    known = envs.environment_variables.keys() - _NAMES_OUT
    return {name: surroundings[name] for name in sorted(known) if name in surroundings}
