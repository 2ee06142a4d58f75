"""What `hotspan serve` was asked for, and the checks that need no engine."""

import errno
import socket
from dataclasses import dataclass
from pathlib import Path

from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.tiers.directory import check_directory
from hotspan.tiers.slab import check_room


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One replica.

    cache:   None serves with the engine's own prefix cache only.
    engine:  options for vLLM, as the user wrote them.
    drain_s: how long requests in flight may go on after a signal to stop.
    """

    model: str
    host: str
    port: int
    cache: CacheSettings | None
    engine: tuple[str, ...] = ()
    drain_s: int = 30


def bind(host: str, port: int) -> socket.socket:
    """The server's socket, not yet listening, so that a taken port is an error at once and not after the model loaded.

    Raises: ConfigError if the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OverflowError as error:
        listener.close()
        raise ConfigError(f"--port {port} is no port: give one from 1 to 65535") from error
    except OSError as error:
        listener.close()
        reason = {
            errno.EADDRINUSE: "is taken by another process: stop it, or give another --port",
            errno.EACCES: "needs privileges: give a --port above 1023",
            errno.EADDRNOTAVAIL: "is no address of this machine: give another --host",
        }.get(error.errno or 0, f"can't be had ({error.strerror}): give another --host or --port")
        raise ConfigError(f"{host}:{port} {reason}") from error
    return listener


def check_tiers(settings: CacheSettings) -> None:
    """Raise ConfigError now for what would fail in the engine's process minutes later."""
    check_room(settings.ram_bytes)
    if settings.disk is not None:
        check_directory(Path(settings.disk.directory), settings.disk.bytes)
