"""Every tier below RAM passes the kit unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from hotspan.testing.conformance import StorageTierTests
from hotspan.testing.manual import ManualTier
from hotspan.tiers.disk import DiskOptions, DiskTier


class TestDiskTier(StorageTierTests):
    """The disk tier on a real disk, with O_DIRECT."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[DiskTier]:
        slot = self.PAYLOAD_BYTES + 4096
        tier = DiskTier(DiskOptions(tmp_path / "disk", self.SLOTS * slot), bytes(32), self.PAYLOAD_BYTES)
        yield tier
        tier.close(5.0)


class TestBufferedDiskTier(StorageTierTests):
    """The disk tier where there is no O_DIRECT."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[DiskTier]:
        slot = self.PAYLOAD_BYTES + 4096
        options = DiskOptions(tmp_path / "disk", self.SLOTS * slot, allow_direct=False)
        tier = DiskTier(options, bytes(32), self.PAYLOAD_BYTES)
        yield tier
        tier.close(5.0)


class TestManualTier(StorageTierTests):
    """The tier that the cache's tests stand on."""

    @pytest.fixture
    def tier(self) -> Iterator[ManualTier]:
        tier = ManualTier(self.SLOTS, self.PAYLOAD_BYTES, auto=True)
        yield tier
        tier.close(5.0)
