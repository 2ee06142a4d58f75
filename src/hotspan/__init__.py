"""hotspan: serve large language models on vLLM and compute a long text once."""

from typing import TYPE_CHECKING, Any

from hotspan.core.version import __version__

if TYPE_CHECKING:
    from hotspan.server.python_control import Control

__all__ = ["__version__", "control", "engine_options", "transfer_config"]


def transfer_config(**tiers: Any) -> dict[str, Any]:
    """The value of vLLM's --kv-transfer-config for these tiers: ram="32GiB", disk="/nvme", disk_size="1TiB"."""
    from hotspan.config.connector import named_transfer_config

    return named_transfer_config(**tiers)


def engine_options(**tiers: Any) -> dict[str, Any]:
    """The arguments of vLLM's `LLM` for these tiers: `LLM(model, **engine_options(ram="32GiB"))`."""
    from hotspan.config.connector import engine_options

    return engine_options(**tiers)


def control(llm: Any) -> "Control":
    """The administration of the cache of vLLM's `LLM`: `control(llm).invalidate(tags=["handbook"])`."""
    from hotspan.server.python_control import Control

    return Control(llm)
