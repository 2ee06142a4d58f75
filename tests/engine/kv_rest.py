"""Why each of vLLM's configuration fields that `engine/kv_fields.py` does not list stays out of the namespace.

By section, a part of VllmConfig by its path, and by reason.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

REST: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        "": {
            "sections with fields of their own, here": """
                model_config cache_config parallel_config scheduler_config load_config attention_config mamba_config
                kernel_config lora_config speculative_config diffusion_config compilation_config
            """,
            "the device's kind is in the namespace by itself": "device_config",
            "made from the model's quantization, which is in": "quant_config",
            "says how weights may change; when they do, a new namespace begins (engine/weights.py)": """
                weight_transfer_config
            """,
            "where weights and tables lie, not what they hold": "offload_config engram_config",
            "only chooses defaults of other fields": "optimization_level performance_mode",
            "after KV: what is sampled, and what is made of it": """
                structured_outputs_config reasoning_config watermark_config aux_output_config
            """,
            "how media's embeddings are kept; they go by content": "ec_transfer_config ec_manager_config",
            "how KV moves, and who is told": "kv_transfer_config kv_events_config",
            "how the engine is watched, named and stopped": """
                observability_config logging_config profiler_config instance_id shutdown_timeout
            """,
        },
        "model_config": {
            "in by its files' bytes": "model",
            "in as the configuration that the engine runs": "hf_config hf_text_config hf_overrides hf_config_path",
            "only leads to the configuration": "config_format hf_token",
            "found in the checkpoint, which is in": "word_embeddings_untied_by_checkpoint is_submodel_config",
            "makes tokens, and KV goes by tokens": """
                tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin
                renderer_num_workers
            """,
            "which media are let in; they go by content": "allowed_local_media_path allowed_media_domains",
            "prompts given as embeddings are named by them": "enable_prompt_embeds",
            "rounding": "enforce_eager disable_cascade_attn",
            "after KV: sampling, its figures, pooling": """
                return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay generation_config
                override_generation_config logits_processors pooler_config
            """,
            "a permission; what it permits is in quantization": "allow_deprecated_quantization",
            "a name for clients": "served_model_name",
            "memory while the engine sleeps": """
                enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend sleep_mode_offload_cudagraph
                enable_nccl_comm_suspend enable_cumem_allocator
            """,
            "a section with fields of its own, here": "multimodal_config",
        },
        "model_config.multimodal_config": {
            "which media are let in; they go by content": "language_model_only limit_per_prompt enable_mm_embeds",
            "sizes, kinds and places of caches": """
                mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_tensor_ipc
            """,
            "changes the names themselves": "mm_hasher_algorithm",
            "an engine without KV": "mm_encoder_only",
            "rounding": "mm_encoder_tp_mode mm_encoder_attn_backend",
            "written, not read": "mm_encoder_fp8_scale_save_path",
            "makes tokens, and KV goes by tokens": "interleave_mm_strings",
            "measures memory at the start": "skip_mm_profiling",
        },
        "cache_config": {
            "in as the groups of the KV cache and their layout": """
                block_size user_specified_block_size kv_cache_layout is_attention_free effective_attention_block_size
                _block_size_resolved
            """,
            "in by itself": "prefix_caching_hash_algo",
            "changes the names themselves": "hash_block_size",
            "how much there is, and what is found in it": """
                gpu_memory_utilization num_gpu_blocks_override num_gpu_blocks num_cpu_blocks kv_cache_size_tokens
                kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend
                enable_prefix_caching prefix_match_unit prefix_cache_retention_interval cache_hit_alignment_tokens
            """,
        },
        "parallel_config": {
            "replicas, and the places, ports and processes of ranks": """
                data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local
                data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend
                data_parallel_external_lb data_parallel_hybrid_lb data_parallel_index dp_sync_interval
                _data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank world_size rank
                master_addr master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus
                assigned_physical_gpu_ids ray_workers_use_nsight ray_runtime_env placement_group
                distributed_executor_backend distributed_timeout_seconds cpu_distributed_timeout_seconds
                max_parallel_loading_workers
            """,
            "found in the model, which is in": "is_moe_model",
            "where experts are, and how many copies": """
                enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy enable_elastic_ep
                elastic_ep_max_dp_size
            """,
            "rounding": """
                enable_hc_sp disable_custom_all_reduce enable_shm_tensor_arena enable_dbo ubatch_size
                dbo_decode_token_threshold dbo_prefill_token_threshold disable_nccl_for_dp_synchronization
                dcp_comm_backend dcp_q_replicate
            """,
            "a permission to choose what is in": "_allow_auto_resolve_cp_interleave_size",
            "after KV: sampling": "enable_batch_sharded_sampling",
            "what happens when a rank fails": "enable_fault_tolerance fault_tolerance_config",
        },
        "scheduler_config": {
            "which requests run when, and in which batches (rounding)": """
                max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs
                long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_queued_reqs
                max_num_queued_tokens enable_chunked_prefill max_num_encoder_input_tokens encoder_cache_size policy
                scheduler_cls scheduler_reserve_full_isl watermark prefill_schedule_interval async_scheduling
                stream_interval
            """,
            "found in the model, which is in": "runner_type is_multimodal_model",
        },
        "load_config": {
            "how bytes get to the device, not which": """
                download_dir safetensors_load_strategy safetensors_prefetch_num_threads
                safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
            """,
        },
        "attention_config": {
            "rounding": """
                flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv tq_max_kv_splits_for_cuda_graph
                sparse_mla_prefill_workspace_factor flex_attn_block_m flex_attn_block_n flex_attn_q_block_size
                flex_attn_kv_block_size
            """,
        },
        "kernel_config": {
            "when kernels are made ready and tuned (rounding)": """
                enable_flashinfer_autotune enable_rocm_segmented_attn_autotune enable_cutedsl_warmup enable_jit_warmup
            """,
        },
        "lora_config": {
            "how many adapters there may be, and how large": "max_lora_rank max_loras max_cpu_loras",
            "rounding": "fully_sharded_loras specialize_active_lora",
            "after KV: pooling": "max_lora_cls_labels",
        },
        "speculative_config": {
            "which draft tokens are proposed and taken; the target's KV of a token is the same": """
                prompt_lookup_max prompt_lookup_min num_speculative_tokens_per_batch_size
                suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
                suffix_decoding_min_token_prob rejection_sample_method synthetic_acceptance_rates
                synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk
                use_local_argmax_reduction
            """,
            "rounding": "enforce_eager disable_padded_drafter_batch",
            "sections that are in as such, or made from what is": """
                target_model_config target_parallel_config draft_model_config draft_parallel_config draft_load_config
            """,
            "where the draft model is: the digest of its files is in": "model",
        },
        "compilation_config": {
            "how the same operations are compiled, fused and recorded (rounding)": """
                mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder
                encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch
                encoder_cudagraph_max_frames_per_batch cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes
                decoder_replay_trim_threshold compile_sizes compile_ranges_endpoints inductor_compile_config
                inductor_passes cudagraph_mode cudagraph_num_of_warmups cudagraph_capture_sizes cudagraph_copy_inputs
                cudagraph_specialize_lora use_inductor_graph_partition pass_config max_cudagraph_capture_size
                dynamic_shapes_config fast_moe_cold_start enabled_custom_ops disabled_custom_ops
            """,
            "where it is kept, and what it took": """
                debug_dump_path cache_dir compile_cache_save_format local_cache_dir traced_files compilation_time
                encoder_compilation_time static_forward_context static_all_moe_layers
            """,
        },
    }
)
