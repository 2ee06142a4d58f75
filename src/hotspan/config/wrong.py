"""What is wrong with a configuration: a start is told the first thing, a check all that is wrong by itself."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from hotspan.core.errors import ConfigError

_all: ContextVar[list[ConfigError] | None] = ContextVar("hotspan-wrong", default=None)


@contextmanager
def collected() -> Iterator[list[ConfigError]]:
    """Inside the block, values that are wrong are left out and their errors kept; so is what the block raises at last,
    if nothing was wrong before.
    """
    found: list[ConfigError] = []
    token = _all.set(found)
    try:
        yield found
    except ConfigError as error:
        if not found:
            found.append(error)
    finally:
        _all.reset(token)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Inside the block, the first thing that is wrong is raised."""
    token = _all.set(None)
    try:
        yield
    finally:
        _all.reset(token)


def is_collecting() -> bool:
    """Whether errors are kept."""
    return _all.get() is not None


@contextmanager
def each() -> Iterator[None]:
    """A block that reads one value: its error is kept or raised."""
    try:
        yield
    except ConfigError as error:
        _keep(error)


@contextmanager
def together() -> Iterator[None]:
    """A block that looks at values that go together: what it finds counts only if all of them were right alone."""
    try:
        yield
    except ConfigError as error:
        if not _all.get():
            _keep(error)


def _keep(error: ConfigError) -> None:
    found = _all.get()
    if found is None:
        raise error
    found.append(error)


def all_of(found: list[ConfigError]) -> ConfigError:
    """One error that says all."""
    if len(found) == 1:
        return found[0]
    return ConfigError(f"{len(found)} things are wrong:\n" + "\n".join(f"  {error}" for error in found))
