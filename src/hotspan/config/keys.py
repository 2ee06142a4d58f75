"""All options of `hotspan serve`: hotspan's own, and those of vLLM's that have other names or kinds here."""

from collections.abc import Iterable

from hotspan.config import kinds
from hotspan.config.kinds import Kind
from hotspan.config.options import Option, Spelling, names, options_of
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheOptions
from hotspan.core.errors import did_you_mean

MODEL = Option(
    "model",
    kinds.TEXT,
    "A model's directory, its hub id, or s3://BUCKET/PREFIX.",
    lmi=names("option.model_id"),
    variables=names("HF_MODEL_ID"),
)
CACHE = options_of(CacheOptions)
_SERVER = options_of(ServerSettings)


def _engine(name: str, kind: Kind, help: str, *lmi: str | Spelling, variables: tuple[Spelling, ...] = ()) -> Option:
    """An option of vLLM's."""
    return Option(name, kind, help, lmi=names(*lmi), variables=variables, is_own=False)


_ENGINE = (
    _engine(
        "tensor_parallel_size",
        kinds.DEGREE,
        "GPUs per layer; max uses all.",
        "option.tensor_parallel_degree",
        variables=names("TENSOR_PARALLEL_DEGREE", Spelling("SM_NUM_GPUS", order=1)),
    ),
    _engine(
        "pipeline_parallel_size",
        kinds.COUNT,
        "Pipeline stages.",
        "option.pipeline_parallel_degree",
        variables=names("PIPELINE_PARALLEL_DEGREE"),
    ),
    _engine(
        "max_num_seqs",
        kinds.COUNT,
        "Maximum number of requests in a batch.",
        "option.max_rolling_batch_size",
        variables=names("MAX_BATCH_SIZE"),
    ),
    _engine(
        "max_num_batched_tokens",
        kinds.ANY,
        "Maximum number of tokens per step.",
        "option.max_rolling_batch_prefill_tokens",
        variables=names("MAX_BATCH_PREFILL_TOKENS"),
    ),
    _engine(
        "quantization",
        kinds.TEXT,
        "Quantization method of the weights.",
        "option.quantize",
        variables=names("HF_MODEL_QUANTIZE"),
    ),
    _engine("dtype", kinds.DTYPE, "Data type of weights and activations."),
    _engine("max_model_len", kinds.ANY, "Maximum length of prompt and answer, in tokens."),
    _engine(
        "gpu_memory_utilization",
        kinds.NUMBER,
        "Fraction of the device's memory to use.",
        variables=names("CUDA_MEMORY_FRACTION"),
    ),
    _engine(
        "cpu_offload_gb", kinds.NUMBER, "Weights kept in host memory, in GiB per GPU.", "option.cpu_offload_gb_per_gpu"
    ),
    _engine(
        "enforce_eager",
        kinds.BOOLEAN,
        "Run without CUDA graphs.",
        variables=names(Spelling("ENABLE_CUDA_GRAPHS", kinds.INVERTED)),
    ),
    _engine(
        "trust_remote_code",
        kinds.BOOLEAN,
        "Execute code that comes with the model.",
        variables=names("HF_MODEL_TRUST_REMOTE_CODE"),
    ),
    _engine("revision", kinds.TEXT, "Revision of a hub model.", variables=names("HF_REVISION")),
    _engine(
        "runner",
        kinds.TEXT,
        "Task of the model: generate or pooling.",
        Spelling("option.task", kinds.TASK),
        variables=names(Spelling("HF_TASK", kinds.TASK)),
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

KEYS: tuple[Option, ...] = (MODEL, *CACHE, *_SERVER, *_ENGINE)
BY_NAME = {key.name: key for key in KEYS}
FLAGS: tuple[Option, ...] = (CONFIG_FILE, *CACHE, *_SERVER)
"""hotspan's own options of `hotspan serve`; the engine's stand after them as vLLM has them."""


def unlisted(name: str) -> Option:
    """An option that is vLLM's if anybody's: the engine's parser says whether it knows it."""
    return Option(name, kinds.ANY, "", is_own=False)


def meant(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known names."""
    return did_you_mean(name, known, "docs/configuration.md lists what there is", count=3)
