"""The routes of a replica that compute, vLLM's and LMI's: server and router tell by these what to do with a request.

And those of adapters, by which the server tells who may use them.
"""

import re

INVOCATIONS = "/invocations"
BY_NAME = ("/predictions/{model}", "/models/{model}/invoke", "/endpoints/{model}/invocations")

OPENAI = (
    *("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"),
    *("/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"),
)
"""vLLM's routes whose bodies name a model."""

PRIVILEGED = "/inference/v1/generate"
"""Takes the digests of images as the client gives them: a forged one poisons what tenants share."""

AUDIO = ("/v1/audio/transcriptions", "/v1/audio/translations")

WORK = (
    *OPENAI,
    *("/v2/embed", "/generative_scoring", "/cohere/v2/chat", "/v1/systemone", "/v1/chat/completions/batch"),
    *(*AUDIO, PRIVILEGED),
)
"""vLLM's routes that make it compute."""

STATELESS = (
    *("/tokenize", "/detokenize", "/v1/messages/count_tokens"),
    *("/v1/completions/render", "/v1/completions/derender"),
    *("/v1/chat/completions/render", "/v1/chat/completions/derender"),
    *("/v1/responses/render", "/v1/messages/render", "/cohere/v2/chat/render"),
)
"""vLLM's routes for posts that change nothing and compute next to nothing."""

PREFETCH = "/hotspan/cache/prefetch"
"""Announces a request, to the replica that will get it."""

LOOKUP = "/hotspan/cache/lookup"
"""Tells what is cached of a text."""

PIN = "/hotspan/cache/pin"
"""Has chunks evicted last."""

EXPLAIN = "/hotspan/cache/explain"
"""Tells why a request was not a hit."""

WARM = "/hotspan/cache/warm"
WARM_UP = "/hotspan/cache/warm/{warm_up_id}"
"""Texts that a replica computes while it is idle."""

MODEL = "/models/{model}"
ADAPTERS = "/adapters"
ADAPTER = "/adapters/{adapter_name}"
UPDATE = "/adapters/{adapter_name}/update"

ADAPTER_READS = tuple(prefix + path for prefix in ("", MODEL) for path in (ADAPTERS, ADAPTER))
"""Paths that any client may GET; every other method is the administrator's, or with --client-adapters clients', too."""

ADAPTER_WRITES = (*ADAPTER_READS, *(prefix + UPDATE for prefix in ("", MODEL)))

CANCEL = "/v1/responses/{response_id}/cancel"

SMALL = (
    *("/v1/models", "/v1/models/{model}", "/tokenizer_info", "/load", "/version"),
    *("/v1/responses/{response_id}", CANCEL, WARM_UP, PIN, EXPLAIN),
    *("/hotspan/cache", "/hotspan/cache/clear", "/hotspan/cache/check", "/hotspan/keys/shred", "/hotspan/keys/rotate"),
    *("/hotspan/trace", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", *ADAPTER_WRITES),
    *("/inference/v1/abort_requests", "/abort_requests"),
)
"""What is asked about texts, models and adapters by their names: no body that such a request needs is large."""

MAX_SMALL_BYTES = 1 << 18
"""Of the body of such a request, and of one whose method has none."""

_SMALL = re.compile("|".join(re.sub(r"\{\w+\}", "[^/]+", path) for path in SMALL))
_WITHOUT_BODIES = ("GET", "HEAD", "OPTIONS", "TRACE", "DELETE")


def is_small(method: str, path: str) -> bool:
    """Whether a request needs a small body only, or none."""
    if method in _WITHOUT_BODIES:
        return True
    return path not in STATELESS and _SMALL.fullmatch(path.rstrip("/")) is not None
