"""LMCache's names that set nothing in hotspan: their types, and what happens instead."""

from collections.abc import Mapping

from hotspan.config import kinds
from hotspan.config.fates import foreign, table

_ANY, _BOOLEAN, _INTEGER, _NUMBER, _TEXT = kinds.ANY, kinds.BOOLEAN, kinds.INTEGER, kinds.NUMBER, kinds.TEXT
_THROUGH_RAM = "chunks always pass through RAM: max_local_cpu_size (--ram-gib) is the RAM tier"
_PATIENCE = "the cost model decides how long a request waits for a tier (docs/design/cost.md)"
_SHARE = "hotspan computes a share of the tokens again (--blend-recompute-ratio)"
_SHARED = "replicas share an L2 (remote_url, --l2) instead of asking each other"
_PREFILL = "every replica computes prompts and answers: prefill is not taken apart"
_CONTROLLER = "hotspan has no controller: `hotspan cache` administers a replica"
_DIRECT = "the disk tier is a directory (--disk), read and written with O_DIRECT through RAM"
_ONE_DISK = "the disk tier is one directory: --disk and --disk-gib"
_STORES = "tiers are RAM, --disk and --l2: hotspan has no plug-ins for others"
_ALL_TIERS = "every tier is written and read"
_AT_START = "hotspan takes its RAM at the start"
_METRICS = "hotspan's own port serves /metrics and /hotspan/cache"
_PINS = "a chunk is pinned from its look-up until its request is scheduled"
_EVICTION = "hotspan evicts by ARC, and never what others stand on"
_NO_SCRIPTS = "hotspan runs no scripts"
_NO_HIDDEN = "hotspan keeps KV only, and no hidden states"
_OWN_MOVES = "hotspan moves KV with vLLM's own transfer worker"
_NO_USE = "hotspan has no use for it"

_PD = """
pd_role pd_buffer_size pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_peer_query_port
pd_proxy_host pd_proxy_port pd_allocation_timeout_sec pd_shutdown_timeout_sec pd_condition_poll_interval_sec
pd_max_prefill_len pd_backend_mode pd_skip_proxy_notification pd_bidirectional
nixl_backends nixl_buffer_size nixl_buffer_device nixl_peer_port transfer_channel
"""
_CONTROL = """
controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids lmcache_worker_heartbeat_delay_time
lmcache_worker_heartbeat_time
"""
_API = """
internal_api_server_host internal_api_server_port_start internal_api_server_include_index_list
internal_api_server_socket_path_prefix hit_miss_ratio enable_chunk_statistics chunk_statistics_auto_start_statistics
chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks chunk_statistics_strategy
"""
_LAZY = """
lazy_memory_initial_ratio lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size
reserve_local_cpu_size
"""
_PLUGINS = "runtime_plugin_locations storage_plugins remote_storage_plugins external_lookup_client"
_HIDDEN_STATES = """
enable_hidden_state_cache max_hidden_state_cpu_size hidden_state_layers hidden_states_retrieve_mode
"""

ACCEPTED = table(
    foreign(_BOOLEAN, _THROUGH_RAM, "local_cpu", "true", has_off=False),
    foreign(_TEXT, _THROUGH_RAM, "local_device", "cpu"),
    foreign(_TEXT, "hotspan stores bytes as they are, in frames that verify themselves", "remote_serde", "naive"),
    foreign(_NUMBER, _PATIENCE, "blocking_timeout_secs lookup_timeout_ms"),
    foreign(
        _BOOLEAN, "hotspan stores whole chunks: a smaller chunk_size leaves less of a text out", "save_unfull_chunk"
    ),
    foreign(_TEXT, _EVICTION, "cache_policy", "arc"),
    foreign(_NUMBER, _EVICTION, "cost_aware_half_life_seconds cost_aware_ewma_alpha"),
    foreign(_INTEGER, "hotspan weighs loading against computing by what both have cost", "min_retrieve_tokens", "0"),
    foreign(_BOOLEAN, "hotspan copies the layers of a chunk together", "use_layerwise"),
    foreign(_BOOLEAN, "hotspan always loads while others compute", "enable_async_loading", "true", has_off=False),
    foreign(_TEXT, "hotspan's keys are SHA-256", "pre_caching_hash_algorithm", "sha256 sha256_cbor sha256_cbor_64bit"),
    foreign(_TEXT, "--ram-gib's pages are taken where the kernel puts them (numactl)", "numa_mode"),
    foreign(_TEXT, "a replica is called by its host and process", "lmcache_instance_id app_id"),
    foreign(_ANY, _SHARE, "blend_thresholds"),
    foreign(_BOOLEAN, _SHARED, "enable_p2p"),
    foreign(_ANY, _SHARED, "p2p_host p2p_init_ports p2p_lookup_ports lookup_server_worker_ids"),
    foreign(_BOOLEAN, _PREFILL, "enable_pd"),
    foreign(_ANY, _PREFILL, _PD),
    foreign(_BOOLEAN, _CONTROLLER, "enable_controller"),
    foreign(_ANY, _CONTROLLER, _CONTROL),
    foreign(
        _ANY, "`hotspan daemon` is one cache for a node: --l2 sagemaker-hyperpod://127.0.0.1:9200", "mp_host mp_port"
    ),
    foreign(_BOOLEAN, _AT_START, "enable_lazy_memory_allocator"),
    foreign(_ANY, _AT_START, _LAZY),
    foreign(_BOOLEAN, "mount /dev/shm with huge=advise for huge pages", "local_cpu_use_hugepages"),
    foreign(_BOOLEAN, "vLLM's --kv-events-config turns events on, of every tier", "enable_kv_events"),
    foreign(_BOOLEAN, _METRICS, "internal_api_server_enabled"),
    foreign(_ANY, _METRICS, _API),
    foreign(_ANY, _DIRECT, "gds_path gds_path_sharding gds_buffer_size use_gds gds_backend maru_path maru_pool_size"),
    foreign(_ANY, _ONE_DISK, "local_disk_path_sharding"),
    foreign(_ANY, _ALL_TIERS, "retrieve_locations store_location enable_scheduler_bypass_lookup priority_limit"),
    foreign(_ANY, _STORES, _PLUGINS),
    foreign(_ANY, "nothing is audited: /metrics counts each tier's work", "audit_actual_remote_url"),
    foreign(_ANY, "configuration is read once, from files and variables", "remote_config_url"),
    foreign(_ANY, _NO_SCRIPTS, "script_allowed_imports"),
    foreign(_ANY, _OWN_MOVES, "use_gpu_connector_v3"),
    foreign(_ANY, _PINS, "pin_timeout_sec pin_check_interval_sec"),
    foreign(_ANY, "Python's own settings hold for its garbage collector", "py_enable_gc"),
    foreign(_ANY, _NO_HIDDEN, _HIDDEN_STATES),
)

EXTRA = table(
    foreign(_ANY, "the disk tier always reads and writes with O_DIRECT", "use_odirect", "true", has_off=False),
    foreign(_ANY, "the L2 keeps one object for all ranks", "save_only_first_rank", "true", has_off=False),
    foreign(_ANY, "the L2 keeps one object for all ranks", "remote_enable_mla_worker_id_as0", "true", has_off=False),
    foreign(_ANY, "hotspan's frames have a record of their own", "save_chunk_meta"),
    foreign(_ANY, "--l2-option region=REGION sets it", "s3_region"),
    foreign(_ANY, "--l2-option connections=N sets it", "s3_num_io_threads s3_max_io_concurrency s3_max_inflight_reqs"),
    foreign(_ANY, "each chunk is one object in the bucket", "s3_part_size"),
    foreign(_ANY, "the prefix belongs to the URL: s3://BUCKET/PREFIX", "s3_file_prefix"),
    foreign(_ANY, "the S3 client chooses its protocol itself", "s3_prefer_http2"),
    foreign(_ANY, "--l2-option s3_express=true turns it on", "s3_enable_s3express"),
    foreign(_ANY, "nothing is audited: /metrics counts each tier's work", "audit_actual_remote_url"),
    foreign(_ANY, _PREFILL, "nixl_pool_size nixl_backend enable_nixl_storage"),
)
"""Names in extra_config, besides those of HyperPod's client, which hotspan's takes as they are."""

UNKNOWN = foreign(_ANY, _NO_USE, "unknown")["unknown"]
"""A name in extra_config, or in the connector's, that LMCache's plug-ins may have."""

MULTI_PROCESS = foreign(
    _ANY,
    "hotspan asks no LMCache server: the tiers of this replica take its place (--ram-gib, --disk), and `hotspan "
    "daemon` is one cache for a node",
    "mp",
)["mp"]
"""Names of the connector that asks an LMCache server."""

VARIABLES = table(
    foreign(_ANY, "VLLM_LOGGING_LEVEL and VLLM_LOGGING_CONFIG_PATH set the log", "log_"),
    foreign(_ANY, "hotspan sends nothing about its use", "track_usage usage_"),
    foreign(_ANY, "hotspan has one API only", "use_experimental", "true", has_off=False),
    foreign(_ANY, "hotspan caches no encoder's outputs", "ec_"),
)
"""LMCACHE_* that are no keys of its configuration, by how they begin; LMCACHE_CONFIG_FILE acts."""

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
