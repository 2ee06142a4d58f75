"""What vLLM's general plugins bring to it: `--kv-transfer-config` finds HotspanConnector by its name alone."""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotspan.config.connector import CONNECTOR, CONNECTOR_MODULE
from hotspan.engine.progress import offer_progress
from hotspan.engine.start_files import watch_starts

if TYPE_CHECKING:
    from hotspan.engine.admin import Administrator

ControlOpener = Callable[["Administrator", Any], Callable[[], None]]
"""Given what administers a core's cache, and vLLM's configuration: opens a way to it, and returns what closes that."""

_openers: list[ControlOpener] = []


def register() -> None:
    """Let vLLM find the connector, and its engine core tell whether it computes and note which files it starts with.
    vLLM calls this in each of its processes, possibly more than once.

    The connector is imported when an engine asks for it, so an engine without it pays nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)
    offer_progress()
    watch_starts()


def offer_control(opener: ControlOpener) -> None:
    """Have `opener` called in each engine core that hotspan's own server does not serve; once, however often it is
    offered.
    """
    if opener not in _openers:
        _openers.append(opener)


def open_controls(administrator: "Administrator", config: Any) -> list[Callable[[], None]]:
    """Open all ways to administer a core's cache; what closes them."""
    return [opener(administrator, config) for opener in _openers]


def tokenizer_of(model_config: Any) -> Any:
    """The tokenizer of a model, by vLLM's configuration of it."""
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config)


def log_as_vllm() -> None:
    """Log hotspan's lines where vLLM's go, in this process, unless something else is configured for them."""
    own, engine = logging.getLogger("hotspan"), logging.getLogger("vllm")
    if not own.hasHandlers() and engine.handlers:
        for handler in engine.handlers:
            own.addHandler(handler)
        own.setLevel(engine.level)
