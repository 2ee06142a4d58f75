"""Ports for servers of tests."""

import contextlib
import secrets
import socket


def free_port() -> int:
    """A port of the loopback that nobody uses. It stays free: the kernel gives out higher ones, and nobody draws twice
    the same, also where an engine has seeded `random`.
    """
    while True:
        port = 10_000 + secrets.randbelow(22_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
