"""The process's environment, as it was when asked: what else reads it is given this."""

import os
from collections.abc import Mapping
from types import MappingProxyType


def environment() -> Mapping[str, str]:
    """A copy of the environment that can't be written to."""
    return MappingProxyType(dict(os.environ))
