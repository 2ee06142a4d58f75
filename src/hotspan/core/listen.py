"""Addresses to listen at: taken before anything else is begun, with errors that say what to do."""

import contextlib
import errno
import socket
from collections.abc import Iterator

from hotspan.core.errors import ConfigError


def bind(host: str, port: int, role: str = "") -> socket.socket:
    """A socket of that address, not yet listening, so that a taken port is an error at once.

    role:   what the names of its options begin with.
    Raises: ConfigError if the address can't be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Named, or asyncio leaves TCP_NODELAY off: what follows a head would wait for the client's delayed acknowledgement.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with address_errors(host, port, role):
            listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def address_errors(host: str, port: int, role: str = "") -> Iterator[None]:
    """Turn what the kernel says of an address into a ConfigError."""
    try:
        yield
    except OverflowError as error:
        raise ConfigError(f"--{role}port {port} is no port: give one from 1 to 65535") from error
    except OSError as error:
        reason = {
            errno.EADDRINUSE: f"is taken by another process: stop it, or give another --{role}port",
            errno.EACCES: f"needs privileges: give a --{role}port above 1023",
            errno.EADDRNOTAVAIL: f"is no address of this machine: give another --{role}host",
        }.get(error.errno or 0, f"can't be had ({error.strerror}): give another --{role}host or --{role}port")
        raise ConfigError(f"{host}:{port} {reason}") from error
