"""Which addresses only this machine reaches, and which ports are free on it."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, localhost alone does."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def resolved(host: str) -> str:
    """An address of a host; its name where this machine does not know it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return str(socket.getaddrinfo(host, None, family)[0][4][0])
    except OSError:
        return host


def free_port() -> int:
    """A TCP port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
