"""Which addresses only this machine reaches."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; of names, localhost alone does."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)
