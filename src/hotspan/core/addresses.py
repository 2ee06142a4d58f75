"""Which addresses are this machine's, which only it reaches, and which ports are free on it."""

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


def is_here(host: str) -> bool:
    """Whether a server at a host runs on this machine: loopback, 0.0.0.0, or an address or the name of this machine.

    Blocks: for a look-up of the name, if it begins as this machine's does.
    """
    if is_loopback(host):
        return True
    try:
        return _is_own(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if host.partition(".")[0].lower() != socket.gethostname().partition(".")[0].lower():
        return False
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(_is_own(ipaddress.ip_address(str(each[4][0]))) for each in found)


def _is_own(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    """Whether an address is one of this machine's: what is sent there comes from the same one. Nothing is sent."""
    if address.is_loopback or address.is_unspecified:
        return True
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            source = str(probe.getsockname()[0])
    except OSError:
        return False
    return ipaddress.ip_address(source.partition("%")[0]) == ipaddress.ip_address(str(address).partition("%")[0])


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
