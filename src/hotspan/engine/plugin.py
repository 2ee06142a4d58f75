"""The entry point of vLLM's general plugins: `--kv-transfer-config` finds HotspanConnector by its name alone."""

import logging

from hotspan.config.connector import CONNECTOR, CONNECTOR_MODULE


def register() -> None:
    """Let vLLM find the connector. vLLM calls this in each of its processes, possibly more than once.

    The connector is imported when an engine asks for it, so an engine without it pays nothing.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, CONNECTOR_MODULE, CONNECTOR)


def log_as_vllm() -> None:
    """Log hotspan's lines where vLLM's go, in this process, unless something else is configured for them."""
    own, engine = logging.getLogger("hotspan"), logging.getLogger("vllm")
    if not own.hasHandlers() and engine.handlers:
        for handler in engine.handlers:
            own.addHandler(handler)
        own.setLevel(engine.level)
