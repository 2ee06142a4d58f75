"""What `POST /hotspan/trace` takes, and what its last answer tells of the server (core/recorded.py reads it)."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hotspan.core.requests import BLOCK_RANGE, BLOCK_TOKENS


class Recording(BaseModel):
    """A recording of requests, by a name that the caller draws at random: the hashes are keyed with it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    recording: str = Field(min_length=16, max_length=128, description="At least 16 random characters.")
    block_tokens: int | None = Field(
        None,
        ge=BLOCK_RANGE[0],
        le=BLOCK_RANGE[1],
        description="Tokens per hash, set by the first call. Default: the tokens of a chunk.",
    )
    is_last: bool = Field(False, description="Ends the recording.")

    def tokens_of_blocks(self, chunk_tokens: int | None) -> int:
        """As asked, or of the tiers' chunks, in which text is found again; without tiers, as published traces have."""
        if self.block_tokens is not None or chunk_tokens is None:
            return self.block_tokens or BLOCK_TOKENS
        return min(max(chunk_tokens, BLOCK_RANGE[0]), BLOCK_RANGE[1])


def with_servers(last: dict[str, Any], replicas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A recording's last answer with `servers`, one for each engine core, in place of the one that it names.

    replicas: the cores' stats; empty without tiers.
    """
    server, engines = last["server"], last["engines"]
    rows = {name: value for name, value in last.items() if name not in ("server", "engines")}
    return rows | {"servers": [server | each for each in map(_told, replicas)] or [server] * engines}


def _told(replica: dict[str, Any]) -> dict[str, Any]:
    sizes = {name: tier["capacity_bytes"] for name, tier in replica["tiers"].items()}
    kept = {name: replica[name] for name in ("chunk_tokens", "token_bytes")}
    rates: dict[str, Any] = replica["rates"]
    return kept | {"tier_bytes": sizes} | rates
