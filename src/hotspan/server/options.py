"""What `hotspan serve` was asked for, and the checks that need no engine."""

import ipaddress
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotspan.config.engine_options import split_words
from hotspan.config.model_source import fetch_model, is_remote, model_cache
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheSettings
from hotspan.config.tenants import Tenants
from hotspan.core.errors import ConfigError
from hotspan.http.serving import bind
from hotspan.keyring.keyring import open_keyring
from hotspan.plan.tiers import Extent
from hotspan.server.settings import HttpSettings
from hotspan.tiers.directory import check_directory
from hotspan.tiers.room import RESERVE_BYTES
from hotspan.tiers.slab import check_room


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One replica.

    cache:            None serves with the engine's own prefix cache only.
    engine:           options for vLLM, as the user wrote them.
    drain_s:          how long requests in flight may go on after a signal to stop.
    server:           what it does besides caching; its address is `host` and `port`.
    tenants:          who may use it, if not everybody as one tenant.
    is_isolated:      tenants never hit each other's texts.
    admin_token_file: None takes the token from the environment, or makes one.
    is_insecure:      other machines may reach it without a key.
    extent:           how much the tiers of `cache` that are to be chosen may take; None if none are to be chosen.
    admin_port:       where administration is, at `admin_host`; None has it where the clients are.
    """

    model: str
    host: str
    port: int
    cache: CacheSettings | None
    engine: tuple[str, ...] = field(default=(), repr=False)
    drain_s: int = 30
    server: ServerSettings = field(default_factory=ServerSettings)
    tenants: Tenants = field(default_factory=Tenants)
    is_isolated: bool = True
    admin_token_file: Path | None = None
    is_insecure: bool = False
    extent: Extent | None = None
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None

    @property
    def has_keys(self) -> bool:
        """Whether clients must show a key."""
        return self.tenants.has_keys

    @property
    def principals(self) -> int:
        """How many there can be: tenants, the administrator, and clients without a key."""
        return len(self.tenants.tenants) + 2

    @property
    def engine_values(self) -> dict[str, Any]:
        """The engine's options by their names, as they were written; of one that is given twice, the last."""
        return {option.name: option.value for option in split_words(self.engine) if option.name is not None}


def fetched(options: ServeOptions, environment: Mapping[str, str]) -> ServeOptions:
    """The same with a model that lies on this machine, and that clients know by the name that it was given.

    Blocks: while it is fetched. Raises: ConfigError, as `fetch_model`.
    """
    if not is_remote(options.model):
        return options
    directory = fetch_model(options.model, model_cache(environment), is_secure=options.server.is_secure)
    name = () if "served_model_name" in options.engine_values else ("--served-model-name", options.model)
    return replace(options, model=str(directory), engine=(*options.engine, *name))


def http_settings(
    server: ServerSettings, names: Iterable[str], *, is_embedding: bool, principals: int = 2
) -> HttpSettings:
    """The HTTP side of a server whose base model has these names."""
    sessions = server.sessions
    http = HttpSettings(
        model_names=tuple(dict.fromkeys((*names, "lmi", "model"))),
        is_embedding=is_embedding,
        principals=principals,
        compat=server.compat,
        sessions_path=None if sessions is None else str(sessions.path),
        job_queue_size=server.job_queue_size,
        max_request_bytes=server.max_request_bytes,
        predict_timeout_s=server.predict_timeout_s,
    )
    if sessions is None:
        return http
    return replace(
        http,
        session_s=sessions.expiry_s,
        is_strict_sessions=sessions.is_strict,
        close_forgets=sessions.close_forgets,
    )


def bind_admin(options: ServeOptions, listener: socket.socket) -> socket.socket | None:
    """The administrator's socket; None where administration is at the clients'. Raises: ConfigError, as `bind`."""
    if options.admin_port is None:
        return None
    if options.admin_port == listener.getsockname()[1]:
        raise ConfigError(
            f"--admin-port {options.admin_port} is the clients' --port: give another, also where the addresses differ"
        )
    return bind(options.admin_host, options.admin_port, "admin-")


def check_exposure(listener: socket.socket, options: ServeOptions) -> None:
    """Raise ConfigError if other machines could use this server without a key, and nobody said that they may."""
    check_host(listener.getsockname()[0], options)


def check_host(address: str, options: ServeOptions) -> None:
    """The same of the address that --host is."""
    if options.has_keys or options.is_insecure or is_loopback(address):
        return
    raise ConfigError(
        f"--host {options.host} lets other machines in, and nobody needs a key: give the clients keys with --tenants "
        "FILE, listen on 127.0.0.1, or say --insecure if something else keeps strangers out"
    )


def check_tiers(settings: CacheSettings, environment: Mapping[str, str]) -> None:
    """Raise ConfigError now for what would fail in the engine's process minutes later."""
    if settings.persistence == "none" and settings.disk is not None:
        raise ConfigError(
            "--persistence none keeps KV in memory only, and --disk writes it down: leave one of them out"
        )
    check_room(settings.ram_bytes)
    if settings.encryption is not None:
        open_keyring(Path(settings.encryption.store), settings.encryption.kek, environment).close()
    if settings.disk is not None:
        check_directory(Path(settings.disk.directory), settings.disk.bytes, RESERVE_BYTES)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, localhost alone does."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
