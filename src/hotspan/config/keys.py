"""The table of known keys, written once: reading, checking, --help, explaining and the docs come from it."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from hotspan.config import kinds
from hotspan.config.kinds import Kind
from hotspan.core.types import MIB

Part = Literal["cache", "server", "model", "engine"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """Another name of a key: in serving.properties or config.properties, or of a variable.

    kind:  how it is written there, if not as the key itself.
    order: of names that one source has for one key, the lower one counts; equals that differ are an error.
    """

    name: str
    kind: Kind | None = None
    order: int = 0


@dataclass(frozen=True, slots=True)
class Key:
    """One setting.

    name:      its flag without dashes; of an engine option, vLLM's name.
    default:   None leaves it to vLLM, or off.
    chosen:    how the default is chosen, where `default` is not all there is to say.
    lmi:       LMI's names in its properties files. OPTION_* and SERVING_* follow from them.
    variables: names of variables that follow from nothing.
    lmcache:   its name in LMCache's configuration, and how it is written there.
    """

    name: str
    kind: Kind
    meaning: str
    default: Any = None
    part: Part = "cache"
    lmi: tuple[Spelling, ...] = ()
    variables: tuple[Spelling, ...] = ()
    lmcache: Spelling | None = None
    chosen: str = ""

    @property
    def flag(self) -> str:
        """Its option of `hotspan serve`, which takes vLLM's as well."""
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[Spelling, ...]:
        """All its names in LMI's properties files: `option.` and its own name always is one."""
        plain = Spelling(f"option.{self.name}")
        return self.lmi if plain in self.lmi else (*self.lmi, plain)

    @property
    def is_own(self) -> bool:
        """Whether it is hotspan's own, and not vLLM's."""
        return self.part != "engine"


def _lmi(*names: str) -> tuple[Spelling, ...]:
    return tuple(Spelling(name) for name in names)


_CACHE = (
    Key(
        "ram_gib",
        kinds.GIB,
        "RAM tier, in GiB of /dev/shm.",
        4.0,
        lmcache=Spelling("max_local_cpu_size"),
        chosen="what the model can use, at most a quarter of what is free; 4.0 beside other tiers",
    ),
    Key("disk", kinds.PATH, "Disk tier: a directory of its own, best on NVMe.", lmcache=Spelling("local_disk")),
    Key("disk_gib", kinds.GIB, "Disk tier, in GiB; allocated at the start.", lmcache=Spelling("max_local_disk_size")),
    Key(
        "l2",
        kinds.TEXT,
        "A cache that replicas share: sagemaker-hyperpod://HOST:9200 (`hotspan daemon`, or SageMaker HyperPod's), "
        "redis:// or rediss://HOST:PORT, file:///SHARED/DIRECTORY or s3://BUCKET/PREFIX.",
        lmcache=Spelling("remote_url"),
    ),
    Key(
        "l2_option",
        kinds.PAIRS,
        "NAME=VALUE for the L2's client, such as timeout_ms=1000. May be repeated.",
        lmcache=Spelling("extra_config"),
    ),
    Key(
        "l2_log",
        kinds.TEXT,
        "Where invalidations are shared if the L2 can't do that (SageMaker's own): redis:// or file:///.",
    ),
    Key("chunk_tokens", kinds.INTEGER, "Tokens kept and found as one.", 256, lmcache=Spelling("chunk_size")),
    Key(
        "prompts_only",
        kinds.BOOLEAN,
        "Store the KV of prompts, and not that of answers.",
        False,
        lmcache=Spelling("save_decode_cache", kinds.INVERTED),
    ),
    Key(
        "model_digest",
        kinds.TEXT,
        "How weights are told apart: sampled (fast) or full (reads all of them).",
        "sampled",
    ),
    Key("no_cache", kinds.BOOLEAN, "Serve without hotspan's tiers.", False),
    Key(
        "persistence",
        kinds.TEXT,
        "tiers, or none: nothing leaves memory, and a disk tier is refused.",
        "tiers",
    ),
    Key("kek", kinds.TEXT, "Encrypt what leaves RAM under this key: file:PATH, env:NAME or aws-kms:KEY."),
    Key("key_store", kinds.PATH, "The tenants' wrapped keys: a directory that `hotspan keys init` made."),
    Key(
        "kv_events_key",
        kinds.PATH,
        "File (0600) with the key of KV events, at least 32 characters: only routers that have it can follow them.",
    ),
    Key(
        "tenants",
        kinds.PATH,
        "YAML with API keys, shares and times to live by tenant; then every client needs a key.",
    ),
    Key("share_across_tenants", kinds.BOOLEAN, "Let tenants hit each other's texts: they can tell.", False),
    Key(
        "auto",
        kinds.BOOLEAN,
        "Choose the tiers that nothing else names, a disk tier included, by what the machine has free. Without it and "
        "without any tier named: RAM only, as much as the model can use and at most a quarter of what is free.",
        False,
        lmi=_lmi("option.lmcache_auto_config"),
    ),
    Key(
        "lmcache_config_file",
        kinds.PATH,
        "LMCache's YAML, taken over; in LMI's configuration relative to the model's directory.",
        lmi=_lmi("option.lmcache_config_file"),
        variables=(Spelling("LMCACHE_CONFIG_FILE"),),
    ),
)

_SERVER = (
    Key(
        "admin_token_file",
        kinds.PATH,
        "File (0600) with the admin token; else HOTSPAN_ADMIN_TOKEN, else one is made for this run.",
        part="server",
    ),
    Key(
        "admin_port",
        kinds.COUNT,
        "A port of its own for administration, which --port then refuses.",
        part="server",
    ),
    Key("admin_host", kinds.TEXT, "Address of --admin-port.", "127.0.0.1", part="server"),
    Key(
        "insecure",
        kinds.BOOLEAN,
        "Let other machines in without keys (a --host beyond 127.0.0.1).",
        False,
        part="server",
    ),
    Key("host", kinds.TEXT, "Address to listen on.", "127.0.0.1", part="server"),
    Key(
        "port",
        kinds.INTEGER,
        "Port to listen on.",
        8080,
        part="server",
        variables=(Spelling("SAGEMAKER_BIND_TO_PORT"),),
    ),
    Key(
        "job_queue_size",
        kinds.COUNT,
        "Requests in the engine at a time; more are refused until one ends.",
        1000,
        part="server",
        lmi=_lmi("job_queue_size"),
        variables=(Spelling("MAX_CONCURRENT_REQUESTS"),),
    ),
    Key(
        "max_request_bytes",
        kinds.COUNT,
        "The largest body of a request, in bytes.",
        64 * MIB,
        part="server",
        lmi=_lmi("max_request_size"),
        variables=(
            Spelling("SAGEMAKER_MAX_REQUEST_SIZE"),
            Spelling("SAGEMAKER_MAX_PAYLOAD_IN_MB", kinds.MEBIBYTES, order=1),
        ),
    ),
    Key(
        "predict_timeout_s",
        kinds.SECONDS,
        "Seconds that one request may take.",
        240.0,
        part="server",
        lmi=_lmi("option.predict_timeout"),
        variables=(
            Spelling("SAGEMAKER_MODEL_SERVER_TIMEOUT_SECONDS"),
            Spelling("SAGEMAKER_MODEL_SERVER_TIMEOUT", order=1),
            Spelling("PREDICT_TIMEOUT"),
        ),
    ),
    Key(
        "startup_timeout_s",
        kinds.SECONDS,
        "Seconds until the model must be loaded.",
        1200.0,
        part="server",
        lmi=_lmi("option.model_loading_timeout"),
        variables=(Spelling("SAGEMAKER_STARTUP_TIMEOUT"), Spelling("MODEL_LOADING_TIMEOUT")),
    ),
    Key(
        "no_sessions",
        kinds.BOOLEAN,
        "Refuse sessions (NEW_SESSION).",
        False,
        part="server",
        lmi=(Spelling("option.enable_stateful_sessions", kinds.INVERTED),),
    ),
    Key(
        "sessions_path",
        kinds.PATH,
        "Directory that keeps sessions.",
        "/dev/shm/hotspan_sessions",
        part="server",
        lmi=_lmi("option.sessions_path"),
    ),
    Key(
        "session_expiry_s",
        kinds.SECONDS,
        "Seconds after which a session is gone.",
        1200.0,
        part="server",
        lmi=_lmi("option.sessions_expiration"),
    ),
    Key(
        "strict_sessions",
        kinds.BOOLEAN,
        "Refuse a session that nobody opened; else its id is taken as it is.",
        False,
        part="server",
    ),
    Key(
        "forget_closed_sessions",
        kinds.BOOLEAN,
        "Invalidate what the cache holds of a session when it is closed.",
        False,
        part="server",
    ),
    Key("compat", kinds.COMPAT, "lmi answers errors with LMI's status 424; else none.", "none", part="server"),
    Key(
        "adapters",
        kinds.PATH,
        "Directory with a LoRA adapter in each of its directories; else adapters/ in the model's.",
        part="server",
    ),
    Key(
        "adapter_copies",
        kinds.PATH,
        "Directory for the server's copies of adapters; else /tmp/hotspan-adapters-UID.",
        part="server",
    ),
    Key(
        "formatters",
        kinds.PATH,
        "Directory with model.py or formatter.yaml; else the model's.",
        part="server",
    ),
    Key(
        "default_model",
        kinds.TEXT,
        "Of a store of several models: what requests mean that name none.",
        part="server",
        lmi=_lmi("default_model"),
    ),
    Key(
        "partial",
        kinds.BOOLEAN,
        "Of a store of several models: serve those that load, and go on trying the others.",
        False,
        part="server",
    ),
    Key(
        "models_at_once",
        kinds.COUNT,
        "Of a store of several models: so many load at a time; else one, or all that have GPUs of their own.",
        part="server",
    ),
    Key("formatter_timeout_s", kinds.SECONDS, "Seconds that one call of a formatter may take.", 5.0, part="server"),
    Key(
        "secure",
        kinds.BOOLEAN,
        "Execute no code of the model's, and read only safetensors.",
        False,
        part="server",
        variables=(Spelling("SAGEMAKER_SECURE_MODE"),),
    ),
)

_MODEL = (
    Key(
        "model",
        kinds.TEXT,
        "A model's directory, its hub id, or s3://BUCKET/PREFIX.",
        part="model",
        lmi=_lmi("option.model_id"),
        variables=(Spelling("HF_MODEL_ID"),),
    ),
)


def _engine(name: str, kind: Kind, meaning: str, *lmi: str | Spelling, variables: tuple[Spelling, ...] = ()) -> Key:
    """An option of vLLM's."""
    spellings = tuple(Spelling(name) if isinstance(name, str) else name for name in lmi)
    return Key(name, kind, meaning, None, "engine", spellings, variables)


_ENGINE = (
    _engine(
        "tensor_parallel_size",
        kinds.DEGREE,
        "GPUs that share each layer; max takes all.",
        "option.tensor_parallel_degree",
        variables=(Spelling("TENSOR_PARALLEL_DEGREE"), Spelling("SM_NUM_GPUS", order=1)),
    ),
    _engine(
        "pipeline_parallel_size",
        kinds.COUNT,
        "Stages of the model.",
        "option.pipeline_parallel_degree",
        variables=(Spelling("PIPELINE_PARALLEL_DEGREE"),),
    ),
    _engine(
        "max_num_seqs",
        kinds.COUNT,
        "Requests in one batch.",
        "option.max_rolling_batch_size",
        variables=(Spelling("MAX_BATCH_SIZE"),),
    ),
    _engine(
        "max_num_batched_tokens",
        kinds.ANY,
        "Tokens in one step.",
        "option.max_rolling_batch_prefill_tokens",
        variables=(Spelling("MAX_BATCH_PREFILL_TOKENS"),),
    ),
    _engine(
        "quantization",
        kinds.TEXT,
        "How weights are quantized.",
        "option.quantize",
        variables=(Spelling("HF_MODEL_QUANTIZE"),),
    ),
    _engine("dtype", kinds.DTYPE, "Type of weights and activations."),
    _engine("max_model_len", kinds.ANY, "The longest text, in tokens."),
    _engine(
        "gpu_memory_utilization",
        kinds.NUMBER,
        "Part of the device's memory to use.",
        variables=(Spelling("CUDA_MEMORY_FRACTION"),),
    ),
    _engine("cpu_offload_gb", kinds.NUMBER, "GiB of weights kept in host memory.", "option.cpu_offload_gb_per_gpu"),
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
        "What the model is for.",
        Spelling("option.task", kinds.TASK),
        variables=(Spelling("HF_TASK", kinds.TASK),),
    ),
    _engine(
        "pooler_config",
        kinds.JSON,
        "How embeddings are made.",
        Spelling("option.normalize", kinds.NORMALIZE),
    ),
    _engine("served_model_name", kinds.ANY, "The name that requests call the model by."),
    _engine("enable_lora", kinds.BOOLEAN, "Serve LoRA adapters."),
    _engine("max_loras", kinds.COUNT, "Adapters in one batch."),
    _engine("max_cpu_loras", kinds.COUNT, "Adapters kept in host memory."),
    _engine("max_lora_rank", kinds.COUNT, "The highest rank of an adapter."),
    _engine("speculative_config", kinds.JSON, "Speculative decoding."),
    _engine("limit_mm_per_prompt", kinds.JSON, "Images, videos and the like in one prompt."),
    _engine("chat_template", kinds.TEXT, "Chat template: a file, or itself."),
    _engine("enable_auto_tool_choice", kinds.BOOLEAN, "Let the model choose tools."),
    _engine("tool_call_parser", kinds.TEXT, "How tool calls are read."),
    _engine("reasoning_parser", kinds.TEXT, "How reasoning is read."),
    _engine(
        "allowed_origins",
        kinds.LISTING,
        "Origins whose pages may ask from a browser (CORS); * is all.",
        "cors_allowed_origin",
    ),
    _engine("allowed_methods", kinds.LISTING, "Methods that such a page may use.", "cors_allowed_methods"),
    _engine("allowed_headers", kinds.LISTING, "Headers that such a page may send.", "cors_allowed_headers"),
    _engine("kv_transfer_config", kinds.JSON, "LMCache's connectors: hotspan's tiers take their place."),
)

CONFIG_FILE = Key("config", kinds.PATH, "YAML with any of these names and any option of vLLM's.")
"""Where hotspan's own YAML is; the one key that can't stand in it."""

KEYS: tuple[Key, ...] = (*_MODEL, *_CACHE, *_SERVER, *_ENGINE)
BY_NAME = {key.name: key for key in KEYS}
FLAGS: tuple[Key, ...] = (CONFIG_FILE, *_CACHE, *_SERVER)
"""hotspan's own options of `hotspan serve`; the engine's stand after them as vLLM has them."""


def unlisted(name: str) -> Key:
    """An option that is vLLM's if anybody's: the engine's parser says whether it knows it."""
    return Key(name, kinds.ANY, "", None, "engine")


def meant(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known names."""
    near = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {' or '.join(near)}?" if near else "docs/configuration.md lists what there is"
