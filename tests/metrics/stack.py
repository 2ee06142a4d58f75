"""A cache over RAM, a real disk and a shared store, with its metrics: no engine, and no thread but the test's."""

import errno
import os
import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hotspan.cache.entry import Reader
from hotspan.cache.tiered import TieredCache
from hotspan.core.terms import Terms
from hotspan.core.types import PAGE_BYTES, Chunk, Compress, Lookup, Tier
from hotspan.engine.metrics import CacheMetrics
from hotspan.l2.base import ObjectStore, SharedLog
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.clock import SimulatedClock
from hotspan.tiers import lower
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.files import Files
from hotspan.tiers.lower import LowerTier
from hotspan.tiers.packer import Packer
from hotspan.tiers.pins import Pins
from hotspan.tiers.slab import SharedSlab
from kit.simulated.inline import InlineQueues
from tests.engine.harness.simulated import at_once

SIZE, RAM, DISK = 4 * PAGE_BYTES, 8, 16
NAMESPACE = bytes(32)


class FailingFiles(Files):
    """The real disk, whose reads and writes fail with `error` while there is one."""

    error: int | None = None

    def preadv(self, *arguments: Any) -> int:
        self._fail()
        return super().preadv(*arguments)

    def pwritev(self, *arguments: Any) -> int:
        self._fail()
        return super().pwritev(*arguments)

    def _fail(self) -> None:
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))


class TickingClock(SimulatedClock):
    """Each look at it takes a microsecond: what takes time takes some."""

    def monotonic(self) -> float:
        self.advance(1e-6)
        return super().monotonic()


class Stack:
    """What a test turns: RAM and DISK slots, one thread for each lower tier, and one store that waits for it."""

    def __init__(
        self, path: Path, store: ObjectStore, log: SharedLog, clock: SimulatedClock, compress: Compress
    ) -> None:
        self.path, self.clock, self.files = path, clock, FailingFiles()
        self.queues = {tier: InlineQueues() for tier in (Tier.DISK, Tier.L2)}
        self.slab = SharedSlab(f"test-{uuid.uuid4().hex}", RAM, SIZE)
        self.slab.unlink()
        self.follower = LogFollower(log, "a", clock)
        self.read_log()
        pins = Pins(clock)
        packer = None if compress == "never" else Packer(compress, 4, clock)
        size = DISK * (SIZE + PAGE_BYTES)
        disk = DiskOptions(
            *(path / "disk", size, 1, 2), files=self.files, queue=self.queues[Tier.DISK].queue, pins=pins, packer=packer
        )
        remote = RemoteOptions(store, self.follower, 1, 2, queue=self.queues[Tier.L2].queue, compress=compress)
        self.lower = {
            Tier.DISK: LowerTier(lambda again: DiskTier(disk, NAMESPACE, SIZE, clock), clock),
            Tier.L2: LowerTier(lambda again: RemoteTier(remote, NAMESPACE, SIZE, clock), clock),
        }
        self.cache = TieredCache(self.slab, *self.lower.values(), clock=clock, pins=pins)
        self.metrics = CacheMetrics(self.cache, self.follower)

    def read_log(self) -> None:
        """As the follower's thread and the scheduler do."""
        self.follower.poll()
        self.follower.foreign()

    def settle(self) -> None:
        """All I/O ends, and is reported."""
        self.read_log()
        for _ in range(6):
            for queues in self.queues.values():
                queues.run()
            self.cache.step()
        self.cache.check()
        self.report()

    def report(self) -> None:
        """What the engine reports once a step."""
        self.metrics.report(1.0)

    def store(self, text: Sequence[Chunk], terms: Terms = Terms(), *, is_noise: bool = False) -> None:  # noqa: B008
        """Into RAM only. is_noise: of bytes that don't shrink."""
        for placement in self.cache.begin_store(text, Reader(terms=terms, bare_terms=terms)):
            chance = random.Random(placement.chunk.key)
            part = chance.randbytes(SIZE if is_noise else 16)
            self.slab.slot(placement.slot)[:] = part * (SIZE // len(part))
        self.cache.end_store(text)

    def stored(self, text: Sequence[Chunk], terms: Terms = Terms(), *, is_noise: bool = False) -> None:  # noqa: B008
        """On every tier; on a full disk once it was used a second time."""
        self.store(text, terms, is_noise=is_noise)
        self.settle()
        keys = [chunk.key for chunk in text]
        self.cache.begin_load(keys, Reader())
        self.cache.end_load(keys)
        self.settle()

    def forget(self, text: Sequence[Chunk], *tiers: Tier) -> None:
        """A text goes from RAM, and from these tiers, without a count."""
        for chunk in reversed(text):
            if chunk.key in self.cache.ram.entries:
                self.cache._forget_one(self.cache.ram.entries[chunk.key])
            for tier in tiers:
                self.lower[tier].storage.discard(chunk.key)
        self.settle()

    def ask(self, text: Sequence[Chunk]) -> list[Lookup]:
        """A request looks a text up and ends; what is on its way lands first."""
        reader = Reader()
        self.cache.ask(text, reader)
        for _ in range(4):
            answers = [self.cache.lookup(chunk, reader) for chunk in text]
            self.settle()
        self.cache.release(reader)
        return answers

    def begin(self, text: Sequence[Chunk]) -> None:
        """The promotions of a text begin, and nothing lands."""
        reader = Reader()
        for chunk in text:
            self.cache.lookup(chunk, reader)
        self.cache.release(reader)

    def heal(self, tier: Tier) -> None:
        """A tier that was given up takes part again."""
        for _ in range(20):
            self.clock.advance(2.0)
            self.settle()
            if self.lower[tier].is_up:
                return
        raise AssertionError(f"{tier} does not come back")


@contextmanager
def stack(
    path: Path,
    open_store: Callable[[SimulatedClock], tuple[ObjectStore, SharedLog]],
    *,
    compress: Compress = "never",
) -> Iterator[Stack]:
    """A cache over `path` and a store. A tier that was given up is opened again at once."""
    clock = TickingClock()
    with patch.object(lower, "start", at_once):
        made = Stack(path, *open_store(clock), clock, compress)
        try:
            yield made
        finally:
            for tier in made.lower.values():
                tier.close(5.0)
            made.slab.close()


IO, FULL = errno.EIO, errno.ENOSPC
