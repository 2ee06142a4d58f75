"""The namespace of an engine: everything besides the tokens that changes KV bytes, read off vLLM's configuration."""

import json
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from hotspan.core.errors import ConfigError
from hotspan.core.namespace import namespace_digest
from hotspan.engine.compat import engine_version, hash_seed, kv_layout
from hotspan.engine.fingerprint import model_digest


def namespace_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int, *, full: bool) -> bytes:
    """The 32-byte namespace digest of this engine; equal only where KV bytes are interchangeable.

    Blocks: for reading the model's headers and samples (all of its weights when `full`).
    """
    return namespace_digest(namespace_fields(vllm_config, kv_cache_config, chunk_tokens, full=full))


def namespace_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int, *, full: bool
) -> dict[str, str | int | bytes]:
    """What the namespace digest is made of, by name."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    fields: dict[str, str | int | bytes] = {
        "model": _model_bytes(str(model.model), model.revision, full=full),
        "revision": str(model.revision),
        "hf_config": _hf_config(model.hf_config.to_dict()),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "load_format": f"{vllm_config.load_config.load_format}/{model.seed}",
        "kv_dtype": str(cache.cache_dtype),
        "kv_layout": kv_layout(vllm_config, kv_cache_config),
        "kv_groups": _groups(kv_cache_config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        "context_parallel": f"{parallel.prefill_context_parallel_size}/{parallel.decode_context_parallel_size}",
        "expert_parallel": str(parallel.enable_expert_parallel),
        "chunk_tokens": chunk_tokens,
        "hash": _hash_chain(cache.prefix_caching_hash_algo),
        "engine": engine_version(),
        "attention": str(getattr(getattr(vllm_config, "attention_config", None), "backend", None)),
        "device": _device(),
    }
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.model not in (None, *_WITHOUT_WEIGHTS):
        fields["draft_model"] = _model_bytes(str(speculative.model), speculative.revision, full=full)
    return fields


_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix", "extract_hidden_states")
"""What vLLM calls the draft model where there is none."""


def _hf_config(fields: dict[str, Any]) -> str:
    """The configuration as the engine runs it, overrides included; where the model lies is no part of it."""
    fields.pop("_name_or_path", None)
    return json.dumps(fields, sort_keys=True, default=str)


def _model_bytes(model: str, revision: str | None, *, full: bool) -> bytes:
    """A local model's digest; a hub model is resolved to its snapshot first."""
    path = Path(model)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(model, revision=revision, local_files_only=True))
    return model_digest(path, full=full)


def _hash_chain(algorithm: str) -> str:
    """What the engine's block hashes start from. Only this algorithm's hashes mean the same in another process."""
    if algorithm != "sha256_cbor":
        raise ConfigError(
            f"prefix_caching_hash_algo is {algorithm} and hotspan's keys need sha256_cbor: "
            "give --prefix-caching-hash-algo sha256_cbor"
        )
    return f"{algorithm}:{hash_seed()}"


def _groups(kv_cache_config: KVCacheConfig) -> str:
    groups: list[Any] = [
        [list(group.layer_names), repr(group.kv_cache_spec)] for group in kv_cache_config.kv_cache_groups
    ]
    return json.dumps(groups)


def _device() -> str:
    """What decides how bytes lie inside a block: on CPUs the instruction set (AMX packs K its own way)."""
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()} amx={_has_amx()}"
    return str(current_platform.device_type)


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text().split("flags", 2)[1].split("\n")[0]
    except (OSError, IndexError):
        return False
