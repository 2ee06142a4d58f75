"""LMI's names that set nothing in hotspan: their types, and what happens instead."""

from hotspan.config import kinds
from hotspan.config.fates import Fate, foreign, table

_ANY, _BOOLEAN, _INTEGER, _TEXT = kinds.ANY, kinds.BOOLEAN, kinds.INTEGER, kinds.TEXT

_ONE_ENGINE = "only vLLM is served, by hotspan's own server"
_BATCHED = "vLLM batches continuously; --max-num-seqs limits the requests of a batch"
_ONE_WORKER = "one hotspan is one replica: start one for each, on devices of its own"
_STORE = "hotspan serves MODEL, option.model_id, HF_MODEL_ID or all that /opt/ml/model holds"
_ONE_PYTHON = "hotspan runs in the Python that it was installed in"
_FORMATTERS = (
    "hotspan runs no handler. Put functions marked with @input_formatter and @output_formatter, or a formatter.yaml, "
    "into the model's directory (docs/formatters.md), or leave it out"
)
_OUTPUT = (
    'answers are JSON, and JSON lines for requests with "stream": true: let the requests ask for a stream, or mark a '
    "function of model.py with @output_formatter (docs/formatters.md), and leave this out"
)
_OTHER_SCHEMA = (
    "answers have LMI's schema on /invocations and OpenAI's on /v1/...: write another one with an @output_formatter in "
    "model.py (docs/formatters.md), and leave this out"
)
_ONE_LOOP = "hotspan's server has one event loop: there are no threads to set"
_HOSTS = (
    "start the server on each host of the engine, with --nnodes, --node-rank and --master-addr, and --headless where "
    "--node-rank is not 0; such an engine has a RAM tier alone (docs/compatibility.md)"
)
_NO_RESTARTS = "hotspan ends with status 2 when its engine fails: whoever runs it starts it again"
_MEMORY = "hotspan and vLLM take memory by --gpu-memory-utilization and --ram-gib"

_WORKERS = "minWorkers maxWorkers min_workers max_workers gpu.minWorkers gpu.maxWorkers cpu.minWorkers cpu.maxWorkers"
_HANDLERS = "djl_python djl_python.lmi_vllm.vllm_async_service djl_python.huggingface"

ACCEPTED = table(
    foreign(_TEXT, _ONE_ENGINE, "engine", "python"),
    foreign(_TEXT, _ONE_ENGINE, "option.rolling_batch", "auto vllm disable"),  # its asynchronous mode wants `disable`
    foreign(_TEXT, _ONE_ENGINE, "option.device", "auto cuda gpu"),
    foreign(_TEXT, _ONE_ENGINE, "translatorFactory"),
    foreign(_BOOLEAN, _ONE_ENGINE, "option.async_mode", "true", has_off=False),
    foreign(_BOOLEAN, _ONE_ENGINE, "option.mpi_mode"),
    foreign(_INTEGER, _BATCHED, "batch_size option.batch_size", "1"),
    foreign(_INTEGER, _BATCHED, "max_batch_delay option.waiting_steps", "0"),
    foreign(_BOOLEAN, "vLLM has one block manager only", "option.use_v2_block_manager", "true", has_off=False),
    foreign(_INTEGER, _ONE_WORKER, _WORKERS, "-1 0 1"),
    foreign(_INTEGER, "the replica stays until it is stopped", "max_idle_time"),
    foreign(_TEXT, f"{_ONE_WORKER} (CUDA_VISIBLE_DEVICES)", "load_on_devices", "*"),
    foreign(_BOOLEAN, _ONE_WORKER, "option.parallel_loading"),
    foreign(_TEXT, 'each request asks for a stream itself, with "stream": true', "option.enable_streaming"),
    foreign(_TEXT, _OUTPUT, "option.output_formatter", "json", fate=Fate.REFUSED),
    foreign(_TEXT, _FORMATTERS, "option.input_formatter", fate=Fate.REFUSED),
    foreign(_TEXT, _FORMATTERS, "option.entryPoint", _HANDLERS, fate=Fate.REFUSED),
    foreign(_TEXT, _FORMATTERS, "option.handler", "handle", fate=Fate.REFUSED),
    foreign(_BOOLEAN, _OTHER_SCHEMA, "option.tgi_compat option.bedrock_compat", fate=Fate.REFUSED),
    foreign(_TEXT, _STORE, "load_models", "all"),
    foreign(_TEXT, _STORE, "model_store", "/opt/ml/model"),
    foreign(_TEXT, _STORE, "model_url_pattern", ".*"),
    foreign(_BOOLEAN, _ONE_PYTHON, "option.enable_venv"),
    foreign(_TEXT, _ONE_PYTHON, "option.pythonExecutable"),
    foreign(_INTEGER, _NO_RESTARTS, "retry_threshold"),
    foreign(_INTEGER, _MEMORY, "required_memory_mb reserved_memory_mb gpu.required_memory_mb gpu.reserved_memory_mb"),
    foreign(_INTEGER, _ONE_LOOP, "number_of_netty_threads netty_client_threads"),
    foreign(_INTEGER, "/metrics counts everything, always", "metrics_aggregation"),
    foreign(_INTEGER, "max_tokens of a request and --max-model-len limit an answer", "max_response_size"),
    foreign(_INTEGER, "max_tokens of a request and --max-model-len limit an answer", "option.max_output_size"),
    foreign(_INTEGER, _HOSTS, "option.cluster_size", "1"),
    foreign(_INTEGER, "vLLM has no such option: adapters bring no tokens of their own", "option.lora_extra_vocab_size"),
    foreign(_BOOLEAN, "/metrics has each request's times", "log_request_metric"),
    foreign(_BOOLEAN, "vLLM loads weights a file at a time", "option.low_cpu_mem_usage", "true", has_off=False),
    foreign(_TEXT, "--admin-port gives administration a port of its own", "management_address"),
    foreign(_TEXT, "hotspan has no plug-ins of DJL's", "plugin_folder features opts config_file"),
    foreign(_TEXT, "--served-model-name names the model", "option.modelName"),
    foreign(_ANY, "vLLM places the layers by --tensor-parallel-size", "option.device_map", "auto"),
)
"""Keys of properties files."""

SAGEMAKER_ACCEPTED = table(
    foreign(_INTEGER, _ONE_WORKER, "SAGEMAKER_NUM_MODEL_WORKERS SAGEMAKER_MODEL_SERVER_WORKERS", "-1 0 1"),
)
"""Variables."""
