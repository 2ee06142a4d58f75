"""The table of known keys, written once: reading, checking, --help, explaining and the docs come from it."""

from collections.abc import Iterable

from hotspan.config import kinds
from hotspan.config.kinds import Kind
from hotspan.config.options import Option, Spelling
from hotspan.core.errors import did_you_mean
from hotspan.core.types import MIB


def _lmi(*names: str) -> tuple[Spelling, ...]:
    return tuple(Spelling(name) for name in names)


CACHE = (
    Option(
        "ram_gib",
        kinds.GIB,
        "RAM tier, in GiB of /dev/shm.",
        4.0,
        lmcache=Spelling("max_local_cpu_size"),
        shown="what the model can use, at most a quarter of what is free; 4.0 beside other tiers",
    ),
    Option(
        "disk", kinds.PATH, "Disk tier: a directory of its own, preferably on NVMe.", lmcache=Spelling("local_disk")
    ),
    Option(
        "disk_gib", kinds.GIB, "Disk tier, in GiB at most; grows with use.", lmcache=Spelling("max_local_disk_size")
    ),
    Option(
        "l2",
        kinds.TEXT,
        "Cache shared by replicas: sagemaker-hyperpod://HOST:9200 (`hotspan daemon`, or SageMaker HyperPod's), "
        "redis:// or rediss://HOST:PORT, file:///SHARED/DIRECTORY or s3://BUCKET/PREFIX.",
        lmcache=Spelling("remote_url"),
    ),
    Option(
        "l2_option",
        kinds.PAIRS,
        "Option of the L2's client, such as timeout_ms=1000 (docs/configuration.md lists them). May be repeated.",
        lmcache=Spelling("extra_config"),
    ),
    Option(
        "l2_log",
        kinds.TEXT,
        "Store for the log of invalidations, where the L2 keeps none (SageMaker's own daemon): redis:// or file:///.",
    ),
    Option(
        "chunk_tokens",
        kinds.INTEGER,
        "Tokens per chunk, the unit that is stored and loaded.",
        256,
        lmcache=Spelling("chunk_size"),
    ),
    Option(
        "prompts_only",
        kinds.BOOLEAN,
        "Store the KV of prompts only, not of answers.",
        False,
        lmcache=Spelling("save_decode_cache", kinds.INVERTED),
    ),
    Option(
        "model_digest",
        kinds.one_of("full", "sampled"),
        "How weights are told apart: full reads all bytes, once per file; sampled is faster and misses edits in place.",
        "full",
    ),
    Option("no_cache", kinds.BOOLEAN, "Serve with the engine's own prefix cache only, without hotspan's tiers.", False),
    Option(
        "persistence",
        kinds.one_of("tiers", "none"),
        "tiers, or none: nothing is written outside memory; --disk and --l2 are refused.",
        "tiers",
    ),
    Option("kek", kinds.TEXT, "Key-encryption key for all data that leaves RAM: file:PATH, env:NAME or aws-kms:KEY."),
    Option("key_store", kinds.PATH, "Directory with the tenants' wrapped keys, made by `hotspan keys init`."),
    Option(
        "kv_events_key",
        kinds.PATH,
        "File (0600) with the key of KV events, at least 32 characters: only routers that have it can follow them.",
    ),
    Option(
        "tenants",
        kinds.PATH,
        "YAML file with API keys, shares and times to live per tenant. With it, every client needs a key.",
    ),
    Option(
        "share_across_tenants",
        kinds.BOOLEAN,
        "Share cached texts between tenants. Tenants can then detect each other's texts by timing.",
        False,
    ),
    Option(
        "auto",
        kinds.BOOLEAN,
        "Choose the tiers that nothing else names, a disk tier included, by what the machine has free. Without it and "
        "without any tier named: RAM only, as much as the model can use and at most a quarter of what is free.",
        False,
        lmi=_lmi("option.lmcache_auto_config"),
    ),
    Option(
        "lmcache_config_file",
        kinds.PATH,
        "LMCache's YAML file; in LMI's configuration, relative to the model's directory.",
        lmi=_lmi("option.lmcache_config_file"),
        variables=(Spelling("LMCACHE_CONFIG_FILE"),),
    ),
)

_SERVER = (
    Option(
        "admin_token_file",
        kinds.PATH,
        "File (mode 0600) with the admin token. Default: HOTSPAN_ADMIN_TOKEN, or a token generated for this run.",
    ),
    Option(
        "admin_port",
        kinds.COUNT,
        "Separate port for administration. With it, --port refuses administration.",
    ),
    Option("admin_host", kinds.TEXT, "Address of --admin-port.", "127.0.0.1"),
    Option(
        "insecure",
        kinds.BOOLEAN,
        "Allow a --host other than 127.0.0.1 without API keys.",
        False,
    ),
    Option("host", kinds.TEXT, "Address to listen on.", "127.0.0.1"),
    Option(
        "port",
        kinds.INTEGER,
        "Port to listen on.",
        8080,
        variables=(Spelling("SAGEMAKER_BIND_TO_PORT"),),
    ),
    Option(
        "job_queue_size",
        kinds.COUNT,
        "Maximum number of requests in the engine; further requests are refused with 429 or 503.",
        1000,
        lmi=_lmi("job_queue_size"),
        variables=(Spelling("MAX_CONCURRENT_REQUESTS"),),
    ),
    Option(
        "max_request_bytes",
        kinds.COUNT,
        "Maximum size of a request body, in bytes.",
        64 * MIB,
        lmi=_lmi("max_request_size"),
        variables=(
            Spelling("SAGEMAKER_MAX_REQUEST_SIZE"),
            Spelling("SAGEMAKER_MAX_PAYLOAD_IN_MB", kinds.MEBIBYTES, order=1),
        ),
    ),
    Option(
        "predict_timeout_s",
        kinds.SECONDS,
        "Maximum duration of one request, in seconds.",
        240.0,
        lmi=_lmi("option.predict_timeout"),
        variables=(
            Spelling("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"),
            Spelling("SAGEMAKER_MODEL_SERVER_TIMEOUT", order=1),
            Spelling("PREDICT_TIMEOUT"),
        ),
    ),
    Option(
        "startup_timeout_s",
        kinds.SECONDS,
        "Maximum time to load the model, in seconds.",
        1200.0,
        lmi=_lmi("option.model_loading_timeout"),
        variables=(Spelling("SAGEMAKER_STARTUP_TIMEOUT"), Spelling("MODEL_LOADING_TIMEOUT")),
    ),
    Option(
        "no_sessions",
        kinds.BOOLEAN,
        "Refuse sessions (NEW_SESSION).",
        False,
        lmi=(Spelling("option.enable_stateful_sessions", kinds.INVERTED),),
    ),
    Option(
        "sessions_path",
        kinds.PATH,
        "Directory for sessions.",
        "/dev/shm/hotspan_sessions",
        lmi=_lmi("option.sessions_path"),
    ),
    Option(
        "session_expiry_s",
        kinds.SECONDS,
        "Seconds after which an unused session expires.",
        1200.0,
        lmi=_lmi("option.sessions_expiration"),
    ),
    Option(
        "strict_sessions",
        kinds.BOOLEAN,
        "Refuse ids of sessions that were not opened. Default: any id is accepted.",
        False,
    ),
    Option(
        "forget_closed_sessions",
        kinds.BOOLEAN,
        "Invalidate the cached texts of a session when it is closed.",
        False,
    ),
    Option("compat", kinds.one_of("none", "lmi"), "lmi: errors have LMI's status 424.", "none"),
    Option(
        "adapters",
        kinds.PATH,
        "Directory with one LoRA adapter per subdirectory. Default: adapters/ in the model's directory.",
    ),
    Option(
        "adapter_copies",
        kinds.PATH,
        "Directory for the server's copies of adapters. Default: /tmp/hotspan-adapters-UID.",
    ),
    Option(
        "client_adapters",
        kinds.PATH,
        "Let clients register adapters without the admin token, from this directory too (SageMaker).",
    ),
    Option(
        "max_client_adapters",
        kinds.COUNT,
        "Maximum number of adapters that a tenant may register. Default: 32, or 1000 where clients have no API keys.",
    ),
    Option(
        "formatters",
        kinds.PATH,
        "Directory with model.py or formatter.yaml. Default: the model's directory, in LMI's configuration only.",
    ),
    Option(
        "default_model",
        kinds.TEXT,
        "Directory of models: default model for requests without `model`.",
        lmi=_lmi("default_model"),
    ),
    Option(
        "partial",
        kinds.BOOLEAN,
        "Directory of models: serve the models that load, and retry the others.",
        False,
    ),
    Option(
        "models_at_once",
        kinds.COUNT,
        "Directory of models: models to load at a time. Default: one, or all if each has GPUs of its own.",
    ),
    Option("formatter_timeout_s", kinds.SECONDS, "Maximum duration of one formatter call, in seconds.", 5.0),
    Option(
        "secure",
        kinds.BOOLEAN,
        "Secure mode: execute no code of the model, and read safetensors only.",
        False,
        variables=(Spelling("SAGEMAKER_SECURE_MODE"),),
    ),
)

_MODEL = (
    Option(
        "model",
        kinds.TEXT,
        "A model's directory, its hub id, or s3://BUCKET/PREFIX.",
        lmi=_lmi("option.model_id"),
        variables=(Spelling("HF_MODEL_ID"),),
    ),
)


def _engine(name: str, kind: Kind, meaning: str, *lmi: str | Spelling, variables: tuple[Spelling, ...] = ()) -> Option:
    """An option of vLLM's."""
    spellings = tuple(Spelling(name) if isinstance(name, str) else name for name in lmi)
    return Option(name, kind, meaning, lmi=spellings, variables=variables, is_own=False)


_ENGINE = (
    _engine(
        "tensor_parallel_size",
        kinds.DEGREE,
        "GPUs per layer; max uses all.",
        "option.tensor_parallel_degree",
        variables=(Spelling("TENSOR_PARALLEL_DEGREE"), Spelling("SM_NUM_GPUS", order=1)),
    ),
    _engine(
        "pipeline_parallel_size",
        kinds.COUNT,
        "Pipeline stages.",
        "option.pipeline_parallel_degree",
        variables=(Spelling("PIPELINE_PARALLEL_DEGREE"),),
    ),
    _engine(
        "max_num_seqs",
        kinds.COUNT,
        "Maximum number of requests in a batch.",
        "option.max_rolling_batch_size",
        variables=(Spelling("MAX_BATCH_SIZE"),),
    ),
    _engine(
        "max_num_batched_tokens",
        kinds.ANY,
        "Maximum number of tokens per step.",
        "option.max_rolling_batch_prefill_tokens",
        variables=(Spelling("MAX_BATCH_PREFILL_TOKENS"),),
    ),
    _engine(
        "quantization",
        kinds.TEXT,
        "Quantization method of the weights.",
        "option.quantize",
        variables=(Spelling("HF_MODEL_QUANTIZE"),),
    ),
    _engine("dtype", kinds.DTYPE, "Data type of weights and activations."),
    _engine("max_model_len", kinds.ANY, "Maximum length of prompt and answer, in tokens."),
    _engine(
        "gpu_memory_utilization",
        kinds.NUMBER,
        "Fraction of the device's memory to use.",
        variables=(Spelling("CUDA_MEMORY_FRACTION"),),
    ),
    _engine(
        "cpu_offload_gb", kinds.NUMBER, "Weights kept in host memory, in GiB per GPU.", "option.cpu_offload_gb_per_gpu"
    ),
    _engine(
        "enforce_eager",
        kinds.BOOLEAN,
        "Run without CUDA graphs.",
        variables=(Spelling("ENABLE_CUDA_GRAPHS", kinds.INVERTED),),
    ),
    _engine(
        "trust_remote_code",
        kinds.BOOLEAN,
        "Execute code that comes with the model.",
        variables=(Spelling("HF_MODEL_TRUST_REMOTE_CODE"),),
    ),
    _engine("revision", kinds.TEXT, "Revision of a hub model.", variables=(Spelling("HF_REVISION"),)),
    _engine(
        "runner",
        kinds.TEXT,
        "Task of the model: generate or pooling.",
        Spelling("option.task", kinds.TASK),
        variables=(Spelling("HF_TASK", kinds.TASK),),
    ),
    _engine(
        "pooler_config",
        kinds.JSON,
        "Configuration of embeddings.",
        Spelling("option.normalize", kinds.NORMALIZE),
    ),
    _engine("served_model_name", kinds.ANY, "Name of the model in requests."),
    _engine("enable_lora", kinds.BOOLEAN, "Serve LoRA adapters."),
    _engine("max_loras", kinds.COUNT, "Maximum number of adapters in a batch."),
    _engine("max_cpu_loras", kinds.COUNT, "Maximum number of adapters in host memory."),
    _engine("max_lora_rank", kinds.COUNT, "Maximum rank of an adapter."),
    _engine("speculative_config", kinds.JSON, "Speculative decoding."),
    _engine("limit_mm_per_prompt", kinds.JSON, "Maximum number of images, videos and other media per prompt."),
    _engine("chat_template", kinds.TEXT, "Chat template, or a file with one."),
    _engine("enable_auto_tool_choice", kinds.BOOLEAN, "Allow the model to choose tools."),
    _engine("tool_call_parser", kinds.TEXT, "Parser for tool calls."),
    _engine("reasoning_parser", kinds.TEXT, "Parser for reasoning."),
    _engine(
        "allowed_origins",
        kinds.LISTING,
        "CORS: allowed origins; * allows all.",
        "cors_allowed_origin",
    ),
    _engine("allowed_methods", kinds.LISTING, "CORS: allowed methods.", "cors_allowed_methods"),
    _engine("allowed_headers", kinds.LISTING, "CORS: allowed request headers.", "cors_allowed_headers"),
    _engine(
        "kv_transfer_config", kinds.JSON, "A connector of LMCache's is replaced by hotspan's tiers; others are refused."
    ),
)

CONFIG_FILE = Option("config", kinds.PATH, "YAML file with any of these options and any option of vLLM.")
"""Where hotspan's own YAML is; the one key that can't stand in it."""

KEYS: tuple[Option, ...] = (*_MODEL, *CACHE, *_SERVER, *_ENGINE)
BY_NAME = {key.name: key for key in KEYS}
FLAGS: tuple[Option, ...] = (CONFIG_FILE, *CACHE, *_SERVER)
"""hotspan's own options of `hotspan serve`; the engine's stand after them as vLLM has them."""


def unlisted(name: str) -> Option:
    """An option that is vLLM's if anybody's: the engine's parser says whether it knows it."""
    return Option(name, kinds.ANY, "", is_own=False)


def meant(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known names."""
    return did_you_mean(name, known, "docs/configuration.md lists what there is", count=3)
