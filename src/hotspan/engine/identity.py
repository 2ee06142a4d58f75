"""The namespace of an engine: everything besides the tokens that changes KV bytes, read off vLLM's configuration."""

import contextlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import is_dataclass
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig

from hotspan.config.environment import environment
from hotspan.core.clock import Clock
from hotspan.core.errors import ConfigError
from hotspan.core.namespace import namespace_digest
from hotspan.engine.checkpoint import Checkpoint
from hotspan.engine.compat import hash_seed, kv_layout
from hotspan.engine.contract import engine_version
from hotspan.engine.fingerprint import FileDigests, model_digest
from hotspan.engine.kv_fields import KV, kv_environment
from hotspan.engine.replicas import replicas_of

logger = logging.getLogger(__name__)


Fields = dict[str, str | int | bytes]


def namespace_of(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int, digests: FileDigests, *, full: bool
) -> bytes:
    """The 32-byte namespace digest of this engine; equal only where KV bytes are interchangeable.

    Blocks: for reading the model's weights that `digests` does not know (only headers and samples unless `full`).
    Raises: ConfigError for an engine whose KV has no lasting name.
    """
    return namespace_digest(namespace_fields(vllm_config, kv_cache_config, chunk_tokens, digests, full=full))


def namespace_fields(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, chunk_tokens: int, digests: FileDigests, *, full: bool
) -> Fields:
    """What the namespace digest is made of, by name."""
    model, speculative = vllm_config.model_config, vllm_config.speculative_config
    fields: Fields = {
        "model": _model_bytes(model, digests, full=full),
        "hf_config": _hf_config(model.hf_config.to_dict()),
        "kv_layout": kv_layout(vllm_config, kv_cache_config),
        "kv_groups": _groups(kv_cache_config),
        "chunk_tokens": chunk_tokens,
        "hash": _hash_chain(vllm_config.cache_config.prefix_caching_hash_algo),
        "engine": engine_version(),
        "device": _device(),
        **_configured(vllm_config),
        **_of_one_copy(vllm_config, replicas_of(vllm_config, kv_cache_config)),
        **{f"environment.{name}": value for name, value in kv_environment(environment()).items()},
    }
    if not _has_digest(model, vllm_config.load_config):
        logger.warning(
            "weights_have_no_digest load_format=%s: they are not read from the model's directory, so what this server "
            "caches is not found after a restart or by other replicas",
            vllm_config.load_config.load_format,
        )
        fields["unknown_weights"] = secrets.token_bytes(16)
    fields |= _scales(vllm_config, digests)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):  # of the first batch, and kept nowhere
        fields["kv_scales"] = secrets.token_bytes(16)
    if speculative is not None and speculative.method not in _WITHOUT_KV and speculative.model is not None:
        fields |= _draft(speculative, vllm_config.load_config, digests, full=full)
    return fields


def draft_config(vllm_config: VllmConfig) -> ModelConfig | None:
    """The draft model's configuration; None without one that has weights."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.model is None or speculative.method in (*_WITHOUT_KV, *_WITHOUT_WEIGHTS):
        return None
    return speculative.draft_model_config


def scales_path(vllm_config: VllmConfig) -> Path | None:
    """The file with the scales of a media encoder; None without one."""
    path = getattr(vllm_config.model_config.multimodal_config, "mm_encoder_fp8_scale_path", None)
    return Path(path) if path else None


_WITHOUT_KV = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding whose drafts come from tokens: they have no weights, and no KV of their own."""

_WITHOUT_WEIGHTS = ("extract_hidden_states", "custom_class")
"""Methods that have no draft model; `model` is the name of one of vLLM's classes or of a user's."""


def _draft(
    speculative: SpeculativeConfig, load: LoadConfig, digests: FileDigests, *, full: bool
) -> dict[str, str | bytes]:
    """What names the KV of a draft model's layers, which is stored beside the target's: its bytes and configuration."""
    if speculative.method in _WITHOUT_WEIGHTS:
        return {"draft_model": str(speculative.model)}
    draft = speculative.draft_model_config
    fields: dict[str, str | bytes] = {
        "draft_model": _model_bytes(draft, digests, full=full),
        "draft_hf_config": _hf_config(draft.hf_config.to_dict()),
    }
    if not _has_digest(draft, getattr(speculative, "draft_load_config", None) or load):
        fields["unknown_draft_weights"] = secrets.token_bytes(16)
    return fields


_READ_FROM_DIRECTORY = frozenset(
    {
        *("auto", "hf", "dummy", "mistral", "safetensors", "fastsafetensors", "instanttensor", "npcache", "pt", "gguf"),
        *("runai_streamer", "runai_streamer_sharded", "sharded_state", "bitsandbytes"),
    }
)
"""Load formats that read the files which `model_digest` reads. The others read a URI, a server or another process."""


def _has_digest(model: ModelConfig, load: LoadConfig) -> bool:
    """Whether the weights are the files of the model's directory, and not somewhere else (gs://, --model-weights)."""
    return not getattr(model, "model_weights", "") and str(load.load_format) in _READ_FROM_DIRECTORY


_PRIVATE = ("unknown_weights", "unknown_draft_weights", "kv_scales")
"""Fields that are there, and random, where a namespace is this process's alone."""

_RELOADED_WHOLE = ("auto", "hf", "safetensors")
"""Load formats in which vLLM's `reload_weights` replaces every tensor by that of a file."""


RELOADS_AS_A_START: set[str] = set()
"""Devices on which an engine that reloaded files was shown to compute what one computes that starts with them.

Not so on CPUs with vLLM 0.32: layers keep copies of the weights in another layout, and `reload_weights` leaves these
(tests/engine/test_weights_engine.py). Nobody has looked at others.
"""


def is_private(fields: Fields) -> bool:
    """Whether no other process has a namespace of these fields."""
    return not fields.keys().isdisjoint(_PRIVATE)


def checkpoint_of(
    vllm_config: VllmConfig, fields: Fields, digests: FileDigests, clock: Clock, *, full: bool
) -> Checkpoint | None:
    """What names this engine's weights after they were reloaded; None if files alone never do.

    Quantized weights, and those that a draft model shares, are made of what was there before as well.
    """
    model = vllm_config.model_config
    if current_platform.device_type not in RELOADS_AS_A_START:
        return None
    is_whole = str(vllm_config.load_config.load_format) in _RELOADED_WHOLE and model.quantization is None
    if not is_whole or vllm_config.speculative_config is not None or is_private(fields):
        return None
    try:
        return Checkpoint(model_directory(model), fields, digests, clock, full=full, with_code=model.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # of headers that are none
        logger.warning("checkpoint_not_read model=%s error=%s", model.model, str(error))
        return None


def _scales(vllm_config: VllmConfig, digests: FileDigests) -> dict[str, bytes]:
    """The bytes of the file with the scales of a media encoder."""
    path = scales_path(vllm_config)
    if path is None:
        return {}
    with contextlib.suppress(OSError):  # vLLM refuses it when it loads the model
        return {"mm_encoder_fp8_scales": digests.of(path)}
    return {}


def _configured(vllm_config: VllmConfig) -> dict[str, str]:
    """The fields of vLLM's configuration that change KV (engine/kv_fields.py), those that this release has."""
    found: dict[str, str] = {}
    for section, names in KV.items():
        part = _section(vllm_config, section)
        if section == "speculative_config" and getattr(part, "method", None) in _WITHOUT_KV:
            continue
        for name in names.split():
            if part is not None and hasattr(part, name):
                found[f"{section}.{name}"] = json.dumps(_plain(getattr(part, name)), sort_keys=True)
    return found


_RANKS = ("parallel_config.tensor_parallel_size", "speculative_config.draft_tensor_parallel_size")


def _of_one_copy(vllm_config: VllmConfig, replicas: int) -> dict[str, str]:
    """The fields of tensor parallelism where ranks share one copy: those of as many ranks as there are copies.

    The bytes are then the same however many ranks compute them; only the rounding of their sums differs.
    """
    if replicas == 1:
        return {}
    copies = vllm_config.parallel_config.tensor_parallel_size // replicas
    return {name: json.dumps(copies) for name in _RANKS if name in _configured(vllm_config)}


def _section(vllm_config: VllmConfig, path: str) -> Any:
    """A part of the configuration by its path; None if this engine has none."""
    part: Any = vllm_config
    for name in filter(None, path.split(".")):
        part = getattr(part, name, None)
    return part


def _plain(value: object) -> object:
    """A value as JSON has it, the same in every process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields_of(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(part), sort_keys=True) for part in value)
    if isinstance(value, Sequence):
        return [_plain(part) for part in value]
    if isinstance(value, torch.dtype | PurePath):
        return str(value)
    if callable(compute_hash := getattr(value, "compute_hash", None)):
        return str(compute_hash())
    raise ConfigError(
        f"the engine's configuration holds a {type(value).__qualname__}, which has no lasting name: leave out the "
        "option that brings it, or serve with --no-cache"
    )


def _hf_config(fields: dict[str, Any]) -> str:
    """The configuration as the engine runs it, overrides included; where the model lies is no part of it.

    EAGLE's configuration has another one inside, which also names its directory.
    """

    def without_path(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {name: without_path(part) for name, part in value.items() if name != "_name_or_path"}

    return json.dumps(without_path(fields), sort_keys=True, default=str)


def model_directory(model: ModelConfig) -> Path:
    """Where a model's files are: of a hub model its snapshot."""
    path = Path(model.model)
    if not path.is_dir():
        from huggingface_hub import snapshot_download

        path = Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    return path


def _model_bytes(model: ModelConfig, digests: FileDigests, *, full: bool) -> bytes:
    """A model's digest."""
    return model_digest(model_directory(model), digests, full=full, with_code=model.trust_remote_code)


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
    """What decides how bytes lie inside a block: on CPUs the instruction set (AMX packs K its own way), on GPUs the
    compute capability, by which vLLM chooses kernels and backends of attention, whose results may differ in bits.
    """
    if current_platform.is_cpu():
        return f"cpu {torch.backends.cpu.get_cpu_capability()} amx={_has_amx()}"
    capability = current_platform.get_device_capability()
    if capability is None:  # other accelerators have none
        return str(current_platform.device_type)
    return f"{current_platform.device_type} {capability.major}.{capability.minor}"


def _has_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text().split("flags", 2)[1].split("\n")[0]
    except (OSError, IndexError):
        return False
