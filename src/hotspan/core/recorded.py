"""What the engines were whose requests a trace has: the first row of a recorded file says it, in `servers`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB

_MOST = 1e18


@dataclass(frozen=True, slots=True)
class RecordedServer:
    """One engine; 0 or nothing for what it did not tell.

    block_tokens:             of the blocks of its own pool, which holds `gpu_tokens`.
    chunk_tokens:             of the chunks of its tiers. token_bytes: of KV.
    tier_bytes:               what each tier holds, by its name.
    step_tokens, max_running: tokens and requests of a step, at most.
    prefill_tokens_per_s, tier_bytes_per_s: as it had measured them when the recording ended.
    """

    model: str = ""
    block_tokens: int = 0
    chunk_tokens: int = 0
    gpu_tokens: int = 0
    token_bytes: float = 0.0
    step_tokens: int = 0
    max_running: int = 0
    prefill_tokens_per_s: float = 0.0
    tier_bytes: Mapping[str, float] = field(default_factory=dict)
    tier_bytes_per_s: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, told: Any, where: str) -> Self:
        """What a row says of an engine. Names that are not known are let pass. Raises: ConfigError."""
        if not isinstance(told, dict):
            raise ConfigError(f"{where}: servers is no list of objects")
        known = [each.name for each in fields(cls) if each.name in told]
        return cls(**{name: _checked(told[name], name, where) for name in known})


def recorded_servers(row: Mapping[str, Any], where: str) -> tuple[RecordedServer, ...]:
    """Those that a row names; none in most files. Raises: ConfigError."""
    told = row.get("servers", [])
    if not isinstance(told, list):
        raise ConfigError(f"{where}: servers is no list of objects")
    return tuple(RecordedServer.of(each, where) for each in told)


def described(server: RecordedServer) -> str:
    """It in words, as far as it told."""
    tiers = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in server.tier_bytes.items() if size)
    parts = [
        f"a pool of {server.gpu_tokens:,} tokens" if server.gpu_tokens else "",
        tiers,
        f"chunks of {server.chunk_tokens} tokens in {_blocks(server)}" if server.chunk_tokens else "",
    ]
    return ": ".join(filter(None, (server.model or "an engine", ", ".join(filter(None, parts)))))


def _blocks(server: RecordedServer) -> str:
    """The engine's blocks of a chunk."""
    if not server.block_tokens or server.chunk_tokens % server.block_tokens:
        return "the engine's blocks"
    count = server.chunk_tokens // server.block_tokens
    return f"{count} block{'s' * (count > 1)}"


def _checked(value: Any, name: str, where: str) -> Any:
    if name == "model":
        is_right = isinstance(value, str)
    elif name.startswith("tier_"):
        is_right = isinstance(value, dict) and all(map(_is_amount, value.values()))
    else:
        is_whole = name.endswith(("_tokens", "_running"))
        is_right = _is_amount(value) and (not is_whole or isinstance(value, int))
    if is_right:
        return value
    raise ConfigError(f"{where}: servers has {name} {value!r:.60}, which a recording does not write: record it again")


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _MOST
