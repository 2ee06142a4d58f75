"""LMCache's names that have nothing to do in hotspan, and what hotspan does instead."""

from collections.abc import Mapping

from hotspan.config import kinds
from hotspan.config.kinds import Kind

_ANY, _BOOLEAN, _INTEGER, _NUMBER, _TEXT = kinds.ANY, kinds.BOOLEAN, kinds.INTEGER, kinds.NUMBER, kinds.TEXT
_NO_USE = "hotspan has no use for it"
_OWN_BLENDING = "chunks are reused at their place only: there is nothing to blend"

_UNUSED = """
reserve_local_cpu_size local_disk_path_sharding retrieve_locations store_location p2p_host p2p_init_ports
p2p_lookup_ports mp_host mp_port controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids
lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time pd_role pd_buffer_size pd_buffer_device pd_peer_host
pd_peer_init_port pd_peer_alloc_port pd_peer_query_port pd_proxy_host pd_proxy_port pd_allocation_timeout_sec
pd_shutdown_timeout_sec pd_condition_poll_interval_sec pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification
pd_bidirectional transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device nixl_peer_port gds_path
gds_path_sharding gds_buffer_size use_gds gds_backend maru_path maru_pool_size audit_actual_remote_url
internal_api_server_host internal_api_server_port_start internal_api_server_include_index_list
internal_api_server_socket_path_prefix external_lookup_client py_enable_gc cost_aware_half_life_seconds
cost_aware_ewma_alpha priority_limit runtime_plugin_locations storage_plugins remote_storage_plugins hit_miss_ratio
lookup_server_worker_ids enable_scheduler_bypass_lookup script_allowed_imports lazy_memory_initial_ratio
lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size enable_chunk_statistics
chunk_statistics_auto_start_statistics chunk_statistics_auto_exit_timeout_hours
chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy use_gpu_connector_v3 pin_timeout_sec
pin_check_interval_sec remote_config_url app_id enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers
hidden_states_retrieve_mode
"""

ACCEPTED: Mapping[str, tuple[Kind, str]] = {
    "local_cpu": (_BOOLEAN, "hotspan always passes chunks through RAM: max_local_cpu_size is the RAM tier"),
    "local_device": (_TEXT, "hotspan always passes chunks through RAM"),
    "remote_serde": (_TEXT, "hotspan stores bytes as they are, in frames that verify themselves"),
    "blocking_timeout_secs": (_NUMBER, "a request waits for a tier that makes no progress for 50 ms at most"),
    "lookup_timeout_ms": (_NUMBER, "a request waits for a tier that makes no progress for 50 ms at most"),
    "save_unfull_chunk": (
        _BOOLEAN,
        "hotspan stores whole chunks: a smaller chunk_size leaves less of a text out",
    ),
    "save_decode_cache": (_BOOLEAN, "prompts and answers are kept alike"),
    "cache_policy": (_TEXT, "hotspan evicts by ARC, and never what others stand on"),
    "min_retrieve_tokens": (_INTEGER, "hotspan weighs loading against computing by what both have cost"),
    "use_layerwise": (_BOOLEAN, "hotspan copies the layers of a chunk together"),
    "enable_async_loading": (_BOOLEAN, "hotspan always loads while others compute"),
    "pre_caching_hash_algorithm": (_TEXT, "hotspan's keys are SHA-256"),
    "numa_mode": (_TEXT, _NO_USE),
    "lmcache_instance_id": (_TEXT, _NO_USE),
    "blend_recompute_ratios": (_ANY, _OWN_BLENDING),
    "blend_thresholds": (_ANY, _OWN_BLENDING),
    "blend_check_layers": (_ANY, _OWN_BLENDING),
    "blend_min_tokens": (_INTEGER, _OWN_BLENDING),
    "blend_special_str": (_ANY, _OWN_BLENDING),
    "enable_lazy_memory_allocator": (_BOOLEAN, "hotspan takes its RAM at the start"),
    "local_cpu_use_hugepages": (_BOOLEAN, "mount /dev/shm with huge=advise for huge pages"),
    "enable_kv_events": (_BOOLEAN, _NO_USE),
    "internal_api_server_enabled": (_BOOLEAN, "hotspan's own port serves /metrics and /hotspan/cache"),
    **dict.fromkeys(_UNUSED.split(), (_ANY, _NO_USE)),
}
"""Accepted, each with its type and what hotspan does instead."""

SURPRISES: Mapping[str, str] = {
    "enable_blending": "hotspan reuses chunks at their place only: text that moved within a prompt is computed again",
    "enable_p2p": "replicas share an L2 (remote_url) instead of asking each other",
    "enable_pd": "every replica computes prompts and answers: prefill is not taken apart",
    "enable_controller": "hotspan has no controller: `hotspan cache` administers a replica",
}
"""Accepted with a warning, if true."""

EXTRA: Mapping[str, str] = {
    "use_odirect": "the disk tier always reads and writes with O_DIRECT",
    "save_only_first_rank": "the L2 keeps one object for all ranks",
    "remote_enable_mla_worker_id_as0": "the L2 keeps one object for all ranks",
    "save_chunk_meta": "hotspan's frames have a record of their own",
    "s3_region": "--l2-option region=REGION says it",
    "s3_num_io_threads": "--l2-option connections=N says it",
    "s3_prefer_http2": _NO_USE,
    "s3_enable_s3express": _NO_USE,
    "s3_max_io_concurrency": "--l2-option connections=N says it",
    "s3_max_inflight_reqs": "--l2-option connections=N says it",
    "s3_part_size": _NO_USE,
    "s3_file_prefix": "the prefix belongs to the URL: s3://BUCKET/PREFIX",
    "audit_actual_remote_url": _NO_USE,
    "nixl_pool_size": _NO_USE,
    "nixl_backend": _NO_USE,
    "enable_nixl_storage": _NO_USE,
}
"""Names in extra_config, besides those of HyperPod's client, which hotspan's takes as they are."""

RENAMED: Mapping[str, str] = {
    "enable_xpyd": "enable_pd",
    "nixl_peer_host": "pd_peer_host",
    "nixl_peer_init_port": "pd_peer_init_port",
    "nixl_peer_alloc_port": "pd_peer_alloc_port",
    "nixl_proxy_host": "pd_proxy_host",
    "nixl_proxy_port": "pd_proxy_port",
    "nixl_role": "pd_role",
    "controller_url": "controller_pull_url",
    "lmcache_worker_port": "lmcache_worker_ports",
    "plugin_locations": "runtime_plugin_locations",
    "external_backends": "storage_plugins",
}
"""Names that LMCache has given up, and what they are called now."""

IGNORED_VARIABLES = ("config_file", "ec_", "log_", "track_usage", "use_experimental", "usage_")
"""LMCACHE_* that are no keys of its configuration begin so."""
