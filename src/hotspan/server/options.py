"""The options of one `hotspan serve`, and the checks that need no engine."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotspan.config.engine_options import split_words
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheSettings
from hotspan.config.tenants import Tenants
from hotspan.core.addresses import is_loopback
from hotspan.core.errors import ConfigError
from hotspan.core.shared_memory import check_room
from hotspan.http.connections import HttpLimits
from hotspan.http.serving import bind
from hotspan.keyring.keyring import open_keyring
from hotspan.plan.tiers import Extent
from hotspan.plan.weights import is_remote
from hotspan.server.source import fetch_model, model_cache
from hotspan.tiers.directory import check_directory
from hotspan.tiers.room import RESERVE_BYTES


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One replica.

    cache:            None serves with the engine's own prefix cache only.
    engine:           options for vLLM, as the user wrote them.
    drain_s:          how long requests in flight may go on after a signal to stop.
    server:           what it does besides caching.
    tenants:          who may use it, if not everybody as one tenant.
    is_isolated:      tenants never hit each other's texts.
    extent:           how much the tiers of `cache` that are to be chosen may take; None if none are to be chosen.
    """

    model: str
    cache: CacheSettings | None
    engine: tuple[str, ...] = field(default=(), repr=False)
    drain_s: int = 30
    server: ServerSettings = field(default_factory=ServerSettings)
    tenants: Tenants = field(default_factory=Tenants)
    is_isolated: bool = True
    extent: Extent | None = None

    @property
    def has_keys(self) -> bool:
        """Whether clients must show a key."""
        return self.tenants.has_keys

    @property
    def limits(self) -> HttpLimits:
        """What clients may take. The principals are the tenants, the administrator, and clients without a key."""
        return HttpLimits(max_request_bytes=self.server.max_request_bytes, principals=len(self.tenants.tenants) + 2)

    @property
    def engine_values(self) -> dict[str, Any]:
        """The engine's options by their names, as they were written; of one that is given twice, the last."""
        return {option.name: option.value for option in split_words(self.engine) if option.name is not None}


def fetched(options: ServeOptions, environment: Mapping[str, str]) -> ServeOptions:
    """The same with a remote model replaced by its local copy; clients use the name that was given.

    Blocks: while it is fetched. Raises: ConfigError, as `fetch_model`.
    """
    if not is_remote(options.model):
        return options
    directory = fetched_model(options.model, options, environment)
    name = () if "served_model_name" in options.engine_values else ("--served-model-name", options.model)
    return replace(options, model=str(directory), engine=(*options.engine, *name))


def fetched_model(url: str, options: ServeOptions, environment: Mapping[str, str]) -> Path:
    """The local copy of a model that this server uses, also as the draft model of another. Raises: as `fetch_model`."""
    return fetch_model(url, model_cache(environment), is_secure=options.server.secure)


def bind_admin(options: ServeOptions, listener: socket.socket) -> socket.socket | None:
    """The administrator's socket; None where administration is at the clients'. Raises: ConfigError, as `bind`."""
    server = options.server
    check_admin_port(server, listener.getsockname()[1])
    return None if server.admin_port is None else bind(server.admin_host, server.admin_port, "admin-")


def check_admin_port(server: ServerSettings, port: int) -> None:
    """Raise ConfigError if administration is to have the clients' port."""
    if server.admin_port == port:
        raise ConfigError(f"--admin-port {port} is the clients' --port: give another, also where the addresses differ")


def check_exposure(listener: socket.socket, options: ServeOptions) -> None:
    """Raise ConfigError if other machines could use this server without a key, and --insecure is not given."""
    check_host(listener.getsockname()[0], options)


def check_host(address: str, options: ServeOptions) -> None:
    """The same for the address of --host."""
    if options.has_keys or options.server.insecure or is_loopback(address):
        return
    raise ConfigError(
        f"--host {options.server.host} lets other machines in, and nobody needs a key: give the clients keys with "
        "--tenants FILE, listen on 127.0.0.1, or say --insecure if something else keeps strangers out"
    )


def check_tiers(settings: CacheSettings, environment: Mapping[str, str]) -> None:
    """Raise ConfigError now for tiers that would fail in the engine's process minutes later."""
    check_room(settings.ram_bytes)
    if settings.encryption is not None:
        open_keyring(Path(settings.encryption.store), settings.encryption.kek, environment).close()
    if settings.disk is not None:
        check_directory(Path(settings.disk.directory), settings.disk.bytes, RESERVE_BYTES)
