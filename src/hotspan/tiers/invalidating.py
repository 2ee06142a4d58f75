"""An invalidation in a disk tier's directory that no server uses: the next one that opens it finds nothing of it."""

from collections.abc import Sequence
from pathlib import Path

from hotspan.core.clock import Clock
from hotspan.core.terms import Scope
from hotspan.tiers.check import open_unused
from hotspan.tiers.directory import TIER, replicas
from hotspan.tiers.log import Invalidation
from hotspan.tiers.owned import explained


def invalidate_unused(path: Path, scopes: Sequence[Scope], clock: Clock) -> int:
    """Forget what matches one of the scopes, in the directory and in those of its replicas; how many chunks that were.

    It is durable when this returns.
    Raises: DirectoryError if a server uses it, it is no disk tier's, or it can't be written.
    """
    inner = replicas(path)
    places = [path, *inner] if (path / TIER.table).exists() or not inner else inner
    try:
        return sum(_invalidate(place, scopes, clock) for place in places)
    except OSError as error:
        raise explained(path, error, TIER.whose) from error


def _invalidate(path: Path, scopes: Sequence[Scope], clock: Clock) -> int:
    directory = open_unused(path)
    try:
        if directory.log is None:
            return 0
        entry = Invalidation(directory.generation + 1, tuple(scopes), clock.unix())
        directory.log.append(entry)  # from here on the next start would do the rest
        table = directory.table
        before, slots = len(table.heads()), table.deleted([entry])
        table.free(slots)
        table.write_all(slots)
        table.sync()
        directory.log.begin(entry.generation)
        return before - len(table.heads())
    finally:
        directory.close()
