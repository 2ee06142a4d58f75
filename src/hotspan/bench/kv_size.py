"""How many tokens of a model's KV fill one GiB: from LMCache, the model's config.json, or hotspan's metrics."""

import json
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from hotspan.bench.client import ModelCard, OpenAIClient
from hotspan.bench.config import BenchConfig
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.plan.shape import ModelShape

_INSTEAD: Final = "or pass --tokens-per-gb-kvcache"
_STATUS_TIMEOUT_S: Final = 10.0
# A gauge of one number: no page of Prometheus needs more of a parser for it.
_TOKEN_BYTES: Final = re.compile(r"^hotspan_cache_token_bytes(?:\{[^}]*\})? ([0-9.e+]+)$", re.MULTILINE)


async def tokens_per_gib(config: BenchConfig, model: str, cards: Sequence[ModelCard], client: OpenAIClient) -> int:
    """Tokens of `model` whose KV, over all ranks, fills one GiB.

    --lmcache-url is asked first, then config.json of --model-config or of the directory that the server lists, then
    the server's own metrics.

    Raises: ConfigError if none of them tells, or --lmcache-url can't be read.
    """
    if config.lmcache_url:
        return GIB // await lmcache_bytes_per_token(config.lmcache_url, model)
    directory = _model_directory(config, model, cards)
    if directory is not None:
        return GIB // kv_bytes_per_token(directory)
    token_bytes = _TOKEN_BYTES.search(await client.metrics() or "")
    if token_bytes is None or not float(token_bytes[1]):
        raise ConfigError(
            f"how many tokens of {model} fit into a GiB is unknown: pass --tokens-per-gb-kvcache N, "
            f"--model-config DIR with its config.json, or {config.options.count_flag} N"
        )
    return int(GIB // float(token_bytes[1]))


def kv_bytes_per_token(directory: Path) -> int:
    """Bytes of KV for one token of the model in `directory`, over all ranks, as the engine keeps it by default.

    Raises: ConfigError if there is no config.json, or its layers can't be sized, or keep nothing of a token.
    """
    try:
        size = ModelShape.from_config(directory).kv_bytes_per_token
    except ConfigError as error:
        raise ConfigError(f"{error}; {_INSTEAD}") from error
    if not size:
        raise ConfigError(f"{directory}: this model keeps nothing of each token: {_INSTEAD[3:]}")
    return size


async def lmcache_bytes_per_token(url: str, model: str) -> int:
    """Bytes of KV for one token of `model`, over all ranks, as an LMCache server reports them at /status.

    Its entries are of one engine each, with the bytes of one rank (`cache_size_per_token`) and the number of ranks
    (`world_size`).

    Raises: ConfigError if the server can't be read, does not know the model, or does not tell its size.
    """
    async with OpenAIClient(url.rstrip("/"), "", _STATUS_TIMEOUT_S, time.monotonic) as client:
        page = await client.page("/status")
    try:
        status = json.loads(page or "")
    except ValueError:
        raise ConfigError(f"--lmcache-url: {url}/status can't be read: is it the LMCache server's HTTP port?") from None
    engines = list(_engines(status))
    sizes = [size for name, size in engines if name == model]
    if not sizes:
        known = ", ".join(sorted({name for name, _ in engines})) or "none: is an engine connected to it?"
        raise ConfigError(f"--lmcache-url: {url} has no engine of {model!r}; its models: {known}")
    if not sizes[0]:
        raise ConfigError(f"--lmcache-url: {url} does not tell the size of a token of {model!r}; {_INSTEAD}")
    return sizes[0]


def _engines(status: Any) -> Iterator[tuple[str, int]]:
    """The model and the bytes per token of each engine on a status page, 0 if it does not tell them."""
    for group in ("cache_context_meta", "cb_gpu_context_meta"):
        engines = status.get(group) if isinstance(status, dict) else None
        for engine in engines.values() if isinstance(engines, dict) else ():
            layout = engine.get("kv_cache_layout") if isinstance(engine, dict) else None
            of_rank = layout.get("cache_size_per_token") if isinstance(layout, dict) else None
            if isinstance(engine, dict):
                ranks = engine.get("world_size", 1)
                size = of_rank * ranks if isinstance(of_rank, int) and isinstance(ranks, int) else 0
                yield str(engine.get("model_name", "?")), max(size, 0)


def _model_directory(config: BenchConfig, model: str, cards: Sequence[ModelCard]) -> Path | None:
    if config.model_config:
        return Path(config.model_config)
    roots = [card.root for card in cards if card.name == model] + [model]
    return next((Path(root) for root in roots if root and (Path(root) / "config.json").is_file()), None)
