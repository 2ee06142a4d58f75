"""R10 with an L2 in the place of the disk: replicas churn over a shared directory, and nothing grows.

A replica that begins has new threads. The C library gives threads memory pools (arenas) of their own, up to eight per
core, which fill for many minutes: in five minutes 56 MiB became 70, while objects and blocks of Python stayed as many.
With MALLOC_ARENA_MAX=1 in the environment, as `make l2` has it, there is one pool, and a minute shows whether something
grows; without, it takes an hour.
"""

import gc
import time
from dataclasses import dataclass, field

from hotspan.core.clock import Clock
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.types import GIB, Tier
from hotspan.l2.base import PREAMBLE_BYTES
from kit.places import in_memory
from kit.proof import Findings, Progress, rng_of
from proofs import replicas
from proofs.engine import Broken
from proofs.l2_files import Said, SharedDirectory
from proofs.replica import SIZE, Replica
from proofs.replicas import World
from proofs.soak import Samples, drift

WEIGHTS = {
    name: replicas.WEIGHTS[name]
    for name in ("arrive", "ask", "end_store", "turn", "step", "poll", "time", "invalidate", "evict", "crash")
}
"""Those of R11 without faults."""

_OBJECTS = 8
_OBJECT_BYTES = PREAMBLE_BYTES + HEADER_BYTES + SIZE
_WARM_UP = 0.1
_REMEMBERED = 128
"""Invalidations; a log keeps fewer."""
_MIN_CHURN = 10.0
_MAX_LATE_S = 120.0
"""For a machine too slow for enough of it."""
_MAX_DRIFT = 0.01
_MIN_SAMPLES = 4
_SETTLED_S = 60.0
"""Of a soak: in a shorter one memory still grows to what it will be, and is not looked at."""
_MAX_OVER = 2.0
"""Objects over the capacity of 8: each of 4 writers counts what it wrote itself, and sweeps at 9 down to 7."""


@dataclass(slots=True)
class Churn:
    """What came of it. over: the most objects there were, over the capacity. left: what nobody finished."""

    churn: float = 0.0
    l2_hits: int = 0
    invalidations: int = 0
    samples: int = 0
    over: float = 0.0
    left: int = 0
    drifts: dict[str, float] = field(default_factory=dict)

    @property
    def is_steady(self) -> bool:
        """Whether it was about something, and nothing grew."""
        is_small = self.over <= _MAX_OVER and not self.left and self.samples >= _MIN_SAMPLES
        return is_small and self.churn >= _MIN_CHURN and all(value < _MAX_DRIFT for value in self.drifts.values())


class _Forgetful(World):
    """A world whose own books do not grow either."""

    def after(self, replica: Replica) -> None:
        if len(self._epochs.scopes) > _REMEMBERED:
            del self._epochs.taken[id(self._epochs.scopes.pop(0))]


def churn(hours: float, seed: int, findings: Findings, progress: Progress) -> Churn:
    """Until the time is over, and longer on a machine too slow for enough of it, or until it has failed; what breaks is
    a finding."""
    found, samples, stored = Churn(), Samples(), 0
    capacity, least = _OBJECTS * _OBJECT_BYTES, _MIN_CHURN * _OBJECTS * SIZE
    said, total_s = Said(), hours * 3600
    with in_memory() as root:

        def connect(clock: Clock) -> SharedDirectory:
            return SharedDirectory(root, said, clock, capacity_gib=capacity / GIB)

        world = _Forgetful(rng_of("l2-soak", seed, 0), is_sealed=False, connect=connect, weights=WEIGHTS)
        started_s = time.monotonic()
        end_s = started_s + total_s
        sample_s = min(60.0, total_s / 60)
        next_s = started_s + _WARM_UP * total_s
        try:
            while found.over <= _MAX_OVER and (
                (now_s := time.monotonic()) < end_s
                or ((stored < least or len(samples.fds) < _MIN_SAMPLES) and now_s < end_s + _MAX_LATE_S)
            ):
                world.run(100)
                stored += sum(replica.cache.take_stats().store_bytes[Tier.L2] for replica in world.replicas)
                found.over = max(found.over, len(list(root.glob("objects/*/*/object"))) / _OBJECTS)
                if now_s >= next_s:
                    gc.collect()  # those who crashed are rings
                    samples.take(root / "objects")  # to list all who ever crashed would be what grows
                    next_s += sample_s
                    progress(int(now_s - started_s), int(total_s))
            world.end()
        except (Broken, AssertionError) as error:
            findings.add(0, f"soak, after {time.monotonic() - started_s:.0f} s: {error}")
            world.abandon()
        found.left = len(list(root.glob("tmp/*")))
    found.churn = stored / (_OBJECTS * SIZE)
    found.l2_hits = sum(replica.l2_hits for replica in world.replicas)
    found.invalidations, found.samples = world.counts["invalidations"], len(samples.fds)
    judged = ("rss_bytes", "fds") if total_s >= _SETTLED_S else ("fds",)
    found.drifts = {name: drift(getattr(samples, name)) for name in judged}
    return found
