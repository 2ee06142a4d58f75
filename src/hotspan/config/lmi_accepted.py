"""LMI's names that have nothing to do in hotspan, their types, and what hotspan does instead."""

from collections.abc import Mapping
from typing import Any

from hotspan.config import kinds
from hotspan.config.kinds import Kind

_ANY, _BOOLEAN, _INTEGER, _TEXT = kinds.ANY, kinds.BOOLEAN, kinds.INTEGER, kinds.TEXT

_ONE_ENGINE = "only vLLM is served, by hotspan's own server"
_BATCHED = "vLLM batches continuously: it is not needed"
_ONE_WORKER = "one hotspan is one replica: start one for each, on devices of its own"
_STORE = "hotspan serves MODEL, option.model_id, HF_MODEL_ID or all that /opt/ml/model holds"
_ONE_PYTHON = "hotspan runs in the Python that it was installed in"
_NO_USE = "hotspan has no use for it"
_BY_REQUEST = "each request says whether it streams, and how"
_BY_DECORATOR = "functions of model.py are found by their decorators"
_CONTROLS = "secure mode has all of them on; DISALLOW_CHAT_TEMPLATE only if it is named"

_WORKERS = "minWorkers maxWorkers min_workers max_workers gpu.minWorkers gpu.maxWorkers cpu.minWorkers cpu.maxWorkers"
_SAGEMAKER_WORKERS = "SAGEMAKER_NUM_MODEL_WORKERS SAGEMAKER_MODEL_SERVER_WORKERS"


def _all(*rows: tuple[Kind, str, str]) -> Mapping[str, tuple[Kind, str]]:
    return {name: (kind, note) for kind, note, names in rows for name in names.split()}


ACCEPTED: Mapping[str, tuple[Kind, str]] = _all(
    (_TEXT, _ONE_ENGINE, "engine option.rolling_batch option.device translatorFactory"),
    (_BOOLEAN, _ONE_ENGINE, "option.async_mode option.mpi_mode"),
    (_INTEGER, _BATCHED, "batch_size max_batch_delay option.batch_size option.waiting_steps"),
    (_BOOLEAN, _BATCHED, "option.use_v2_block_manager"),
    (_INTEGER, _ONE_WORKER, f"{_WORKERS} max_idle_time"),
    (_TEXT, _ONE_WORKER, "load_on_devices"),
    (_BOOLEAN, _ONE_WORKER, "option.parallel_loading"),
    (_TEXT, _BY_REQUEST, "option.enable_streaming option.output_formatter"),
    (_TEXT, _BY_DECORATOR, "option.entryPoint option.handler option.input_formatter"),
    (_TEXT, _STORE, "load_models model_store model_url_pattern"),
    (_BOOLEAN, _ONE_PYTHON, "option.enable_venv"),
    (_TEXT, _ONE_PYTHON, "option.pythonExecutable"),
    (_INTEGER, _NO_USE, "retry_threshold metrics_aggregation required_memory_mb reserved_memory_mb"),
    (_INTEGER, _NO_USE, "gpu.required_memory_mb gpu.reserved_memory_mb number_of_netty_threads netty_client_threads"),
    (_INTEGER, _NO_USE, "max_response_size option.max_output_size option.cluster_size option.lora_extra_vocab_size"),
    (_BOOLEAN, _NO_USE, "log_request_metric option.tgi_compat option.bedrock_compat option.low_cpu_mem_usage"),
    (_TEXT, _NO_USE, "management_address plugin_folder features opts config_file option.modelName"),
    (_TEXT, _NO_USE, "cors_allowed_origin cors_allowed_methods cors_allowed_headers"),
    (_ANY, _NO_USE, "option.device_map"),
)
"""Keys of properties files, each with its type and what hotspan does instead."""

SAGEMAKER_ACCEPTED: Mapping[str, tuple[Kind, str]] = _all(
    (_INTEGER, _ONE_WORKER, _SAGEMAKER_WORKERS),
    (_TEXT, _CONTROLS, "SAGEMAKER_SECURITY_CONTROLS"),
)
"""The same of variables."""

_SERVED = {"engine": ("python",), "option.rolling_batch": ("auto", "vllm", "disable")}
"""What stands for vLLM in LMI; its asynchronous mode wants `disable`."""

_SINGLE = frozenset(f"{_WORKERS} {_SAGEMAKER_WORKERS}".split())


def is_surprise(name: str, value: Any) -> bool:
    """Whether what a key asks for is not what is served: another engine, or several workers."""
    if name in _SERVED:
        return value.lower() not in _SERVED[name]
    return name in _SINGLE and value > 1
