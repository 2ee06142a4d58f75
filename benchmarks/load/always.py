"""`hotspan` without its cost model: all that lies below RAM is loaded, and a request waits 5 s while nothing lands.

usage: python -m benchmarks.load.always serve MODEL ..., as `hotspan serve MODEL ...`
"""

from dataclasses import replace
from typing import Any, Final

from hotspan.cli.main import main
from hotspan.config.settings import CacheOptions, CacheSettings

PATIENCE_S: Final = 5.0

_settings = CacheOptions.settings


def settings(self: CacheOptions, **more: Any) -> CacheSettings:
    """What the options say, with a fixed patience, which no option gives."""
    return replace(_settings(self, **more), patience_s=PATIENCE_S)


if __name__ == "__main__":
    CacheOptions.settings = settings  # type: ignore[method-assign]
    main()
