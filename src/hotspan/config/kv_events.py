"""Where an engine publishes its KV events, and who can follow them there.

Events hold the tokens of every tenant's texts and the salts that keep tenants apart. They are for routers only.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hotspan.config.secrets import is_token, read_private
from hotspan.core.addresses import is_loopback
from hotspan.core.curve import LEAST_SECRET, CurveKeys
from hotspan.core.errors import ConfigError

OPTION = "kv_events_config"
"""vLLM's, by its name; JSON."""

FLAG = "--kv-events-key"
LOCAL_ENDPOINT = "tcp://127.0.0.1:5557"
"""Where events are published if nobody says where. vLLM's own default is every address of the machine."""


@dataclass(frozen=True, slots=True)
class Published:
    """What an option of vLLM's publishes.

    endpoint: None is the default. replay: None has none.
    """

    config: Mapping[str, Any]
    endpoint: str | None
    replay: str | None

    @property
    def open_addresses(self) -> tuple[str, ...]:
        """Addresses that other machines may reach."""
        return tuple(each for each in (self.endpoint, self.replay) if each is not None and not is_local(each))


def published(engine_values: Mapping[str, Any]) -> Published | None:
    """What the engine's options, as they were written, publish; None is nothing, also for what vLLM will refuse."""
    given = engine_values.get(OPTION)
    try:
        config = json.loads(given) if isinstance(given, str) else None
    except ValueError:
        return None
    if not isinstance(config, dict) or not _is_on(config.get("enable_kv_cache_events", False)):
        return None
    if config.get("publisher") == "null":
        return None
    endpoint, replay = config.get("endpoint"), config.get("replay_endpoint")
    return Published(config, None if endpoint is None else str(endpoint), None if replay is None else str(replay))


def _is_on(value: object) -> bool:
    """Whether vLLM could take it for true: it also takes numbers and words."""
    return str(value).strip().lower() not in ("false", "0", "0.0", "no", "off", "f", "n")


def is_local(endpoint: str) -> bool:
    """Whether only this machine reaches a ZeroMQ address."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return True
    return is_loopback(endpoint.partition("://")[2].rpartition(":")[0])


def read_key(file: Path) -> CurveKeys:
    """The keys that a file's secret makes. Raises: ConfigError for one that others can read, or that can be guessed."""
    secret = read_private(file, "the key of KV events").strip()
    if len(secret) < LEAST_SECRET or not is_token(secret):
        raise ConfigError(
            f"{FLAG} {file} holds too short a key, or one with spaces: give at least {LEAST_SECRET} visible ASCII "
            "characters (openssl rand -hex 32), the same for replicas and router"
        )
    return CurveKeys.of(secret.encode())
