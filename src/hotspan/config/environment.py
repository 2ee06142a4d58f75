"""The process's environment, as it was when asked: what else reads it is given this."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_|$)|_PORT_[0-9]+_(TCP|UDP|SCTP)(_|$)")
_SERVICE_PORT = re.compile(r"(tcp|udp|sctp)://.*")


def environment() -> Mapping[str, str]:
    """A copy of the environment that can't be written to."""
    return MappingProxyType(dict(os.environ))


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Where fetched models and digests of files are kept: in XDG_CACHE_HOME, else in the user's .cache."""
    return Path(environment.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "hotspan"


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set it for a service: one that is called hotspan gives HOTSPAN_PORT=tcp://10.0.0.1:8080."""
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and bool(_SERVICE_PORT.fullmatch(value)))
