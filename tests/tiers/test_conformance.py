"""Every tier below RAM passes the kit unchanged."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hotspan.core.clock import SystemClock
from hotspan.core.types import PAGE_BYTES, Compress
from hotspan.l2.follower import LogFollower
from hotspan.l2.remote import RemoteOptions, RemoteTier
from hotspan.testing.chunks import chain
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, AnyTierTests, StorageTierTests, load, store
from hotspan.tiers.disk import DiskOptions, DiskTier
from hotspan.tiers.packer import Packer
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.memory_store import MemoryServer
from tests.cache.manual import ManualTier


class DiskTierTests(StorageTierTests):
    """The disk tier on a real disk."""

    OPTIONS: ClassVar[dict[str, Any]] = {}

    def options(self, path: Path) -> DiskOptions:
        """For SLOTS slots in `path`."""
        return DiskOptions(path / "disk", self.SLOTS * (self.PAYLOAD_BYTES + 4096), **self.OPTIONS)

    @pytest.fixture
    def tier(self, tmp_path: Path, clock: SimulatedClock) -> Iterator[DiskTier]:
        tier = DiskTier(self.options(tmp_path), NAMESPACE, self.PAYLOAD_BYTES, clock)
        yield tier
        tier.close(5.0)


class TestDiskTier(DiskTierTests):
    """With O_DIRECT."""


class TestBufferedDiskTier(DiskTierTests):
    """Where there is no O_DIRECT."""

    OPTIONS: ClassVar[dict[str, Any]] = {"allow_direct": False}


class TestSealedDiskTier(DiskTierTests):
    """With encryption."""

    OPTIONS: ClassVar[dict[str, Any]] = {"keys": FixedKeys()}


class TestPackedDiskTier(DiskTierTests):
    """With compression."""

    OPTIONS: ClassVar[dict[str, Any]] = {"packer": Packer("always", 4, SystemClock()), "slot_bytes": PAGE_BYTES}


class TestPackedSealedDiskTier(DiskTierTests):
    """With compression and encryption."""

    OPTIONS: ClassVar[dict[str, Any]] = TestPackedDiskTier.OPTIONS | {"keys": FixedKeys()}


class TestSplitDiskTier(DiskTierTests):
    """With chunks of several slots, none of which is compressed."""

    OPTIONS: ClassVar[dict[str, Any]] = {"slot_bytes": PAGE_BYTES}


class TestInlineDiskTier(DiskTierTests):
    """With a simulation's queues in the place of threads, which run dry whenever the kit waits."""

    @pytest.fixture
    def tier(self, tmp_path: Path, clock: SimulatedClock) -> Iterator[DiskTier]:
        queues = InlineQueues(seed=1)
        path, size = tmp_path / "disk", self.PAYLOAD_BYTES
        tier = CrankedTier(
            DiskOptions(path, self.SLOTS * (size + 4096), queue=queues.queue), NAMESPACE, size, clock, queues
        )
        yield tier
        tier.close(5.0)


class CrankedTier(DiskTier):
    """A disk tier whose `wait` turns the crank."""

    def __init__(
        self, options: DiskOptions, namespace: bytes, payload_bytes: int, clock: SimulatedClock, queues: InlineQueues
    ) -> None:
        self._queues = queues
        super().__init__(options, namespace, payload_bytes, clock)

    def wait(self, timeout_s: float) -> None:
        self._queues.run()

    def finished(self) -> list[Any]:
        transfers = super().finished()
        self._queues.turn()
        return transfers


class TestManualTier(StorageTierTests):
    """The tier that the cache's tests stand on."""

    @pytest.fixture
    def tier(self, clock: SimulatedClock) -> Iterator[ManualTier]:
        tier = ManualTier(self.SLOTS, self.PAYLOAD_BYTES, auto=True, namespace=NAMESPACE, clock=clock)
        yield tier
        tier.close(5.0)


class TestRemoteTier(AnyTierTests):
    """The L2 tier over a store in memory, as far as a tier can be judged that must ask what it has."""

    KEYS: ClassVar[FixedKeys | None] = None
    COMPRESS: ClassVar[Compress] = "never"

    @pytest.fixture
    def tier(self, clock: SimulatedClock) -> Iterator[RemoteTier]:
        server, queues = MemoryServer(clock=clock), InlineQueues(seed=1)
        follower = LogFollower(server.log(), "a", clock)
        follower.poll()
        follower.foreign()
        options = RemoteOptions(server.store(), follower, keys=self.KEYS, compress=self.COMPRESS, queue=queues.queue)
        tier = CrankedRemoteTier(options, NAMESPACE, self.PAYLOAD_BYTES, clock, queues)
        yield tier
        tier.close(5.0)


class TestSealedRemoteTier(TestRemoteTier):
    """With encryption."""

    KEYS = FixedKeys()


class TestCompressedRemoteTier(TestRemoteTier):
    """With compression."""

    COMPRESS: ClassVar[Compress] = "always"

    def test_chunks_are_compressed(self, tier: RemoteTier) -> None:
        """What this class shows, it shows of compressed chunks."""
        chunk = chain("text", 1)[0]
        stored = store(tier, chunk, self.PAYLOAD_BYTES)
        loaded = load(tier, chunk.key, self.PAYLOAD_BYTES)
        assert stored is not None and stored.packing is not None and loaded is not None
        assert stored.packing.choice == "compressed" and stored.packing.stored_bytes == 2 * PAGE_BYTES
        assert stored.bytes == self.PAYLOAD_BYTES and loaded[0].packing == stored.packing


class TestSealedCompressedRemoteTier(TestCompressedRemoteTier):
    """With both."""

    KEYS = FixedKeys()


class CrankedRemoteTier(RemoteTier):
    """An L2 tier whose `wait` and `finished` turn the crank, and follow its log."""

    def __init__(
        self, options: RemoteOptions, namespace: bytes, payload_bytes: int, clock: SimulatedClock, queues: InlineQueues
    ) -> None:
        self._queues = queues
        super().__init__(options, namespace, payload_bytes, clock)

    def wait(self, timeout_s: float) -> bool:
        self._queues.run()
        self._follower.foreign()
        return super().wait(0.0)

    def finished(self) -> list[Any]:
        transfers = super().finished()
        self._queues.run()
        self._follower.foreign()
        return transfers
