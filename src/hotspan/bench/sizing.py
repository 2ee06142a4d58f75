"""How many tokens' KV fit into a GiB, out of a model's config.json (plan/shape.py has the formulas)."""

from pathlib import Path

from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.plan.shape import ModelShape

_INSTEAD = "or pass --tokens-per-gb-kvcache"


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


def tokens_per_gib(directory: Path) -> int:
    """Tokens whose KV fills one GiB."""
    return GIB // kv_bytes_per_token(directory)
