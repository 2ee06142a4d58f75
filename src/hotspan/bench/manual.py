"""Text that people wrote, on every machine: Python's language reference, as `help()` shows it.

CPython ships it (pydoc_data/topics.py, 460 KB; PSF license), so that nothing is downloaded. Another Python version has
a slightly other text.
"""

from functools import cache
from random import Random
from typing import Final

from hotspan.core.errors import ConfigError

_RULE: Final = "***"


def manual(seed: int, words: int) -> str:
    """At least `words` words, unless all of it has fewer: whole topics in an order that the seed draws.

    Raises: ConfigError where Python comes without its topics.
    """
    topics = list(_topics())
    rng, found, have = Random(seed), list[str](), 0
    while topics and have < words:
        found.append(topics.pop(int(rng.random() * len(topics))))
        have += len(found[-1].split())
    return "\n\n".join(found)


@cache
def _topics() -> tuple[str, ...]:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ConfigError(
            "this Python has no pydoc_data, whose text was asked for (Debian: apt-get install python3)"
        ) from error
    found = {text.strip() for text in topics.values()}
    return tuple(sorted(text for text in found if _RULE in text))
