"""An invalidation without a replica: an entry in the log of a shared store, which all its replicas follow."""

import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hotspan.core.clock import Clock
from hotspan.core.errors import ConfigError
from hotspan.core.terms import Scope
from hotspan.l2.base import ObjectStore
from hotspan.l2.follower import WITNESS_S

_LOOK_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Written:
    """An entry that is in the log.

    epoch, generation: its place. replicas: those that are alive and have read it; missing: those that have not yet,
    and read it before they find anything in the store again.
    """

    epoch: bytes
    generation: int
    replicas: tuple[str, ...]
    missing: tuple[str, ...]


def invalidate_shared(
    store: ObjectStore,
    where: str,
    scopes: Sequence[Scope],
    clock: Clock,
    wait_s: float = WITNESS_S,
    sleep: Callable[[float], None] = time.sleep,
) -> Written:
    """Write an invalidation to a store's log, and wait for the replicas that are alive to read it.

    where:  what errors call the store.
    Blocks: for the store, and up to `wait_s` for the replicas.
    Raises: ConfigError for a place that no replica ever used, which stays as it is, and for a store whose log no other
            process reads; OSError if it can't be written.
    """
    if store.log is not None and not store.log.is_used():
        raise ConfigError(
            f"there is no L2 here: {where} has no log, no object and no report of a replica. Give the URL, and the "
            "--l2-option prefix if any, that the replicas were given. Nothing was written, and nothing is forgotten"
        )
    if store.log is None or not store.log.read(0).is_shared:
        raise ConfigError(
            "this store keeps no log of invalidations that replicas share: give the URL of the log that they were "
            "given with --l2-log, or ask each replica (--server)"
        )
    generation = store.log.append(scopes, f"{socket.gethostname()}/{secrets.token_hex(4)}")
    epoch, until_s = store.log.read(generation).epoch, clock.monotonic() + wait_s
    while True:
        alive = store.log.replicas()
        missing = tuple(sorted(name for name, read in alive.items() if read < generation))
        if not missing or clock.monotonic() >= until_s:
            return Written(epoch, generation, tuple(sorted(alive.keys() - set(missing))), missing)
        sleep(_LOOK_EVERY_S)
