"""What a store may state of sizes and numbers, and what a replica makes of more. Part of the kit in stores.py.

    class TestMyStore(StoreBoundsTests):
        make_store: as ever
        @pytest.fixture
        def planter(self, tmp_path):
            return MyPlanter(tmp_path)

A planter writes what it likes, past the store. What is too large, too many or can't be honest is "cannot be
understood": a miss, or a log that begins anew; in no case is it read whole.
"""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from hotspan.core.terms import Scope, Terms
from hotspan.core.types import MIB, ChunkKey
from hotspan.l2 import bounds
from hotspan.l2.base import ObjectStore, updates_of
from hotspan.testing.chunks import chain
from tests.l2.kit.logs import log_of
from tests.l2.kit.stores import MAX_ENTRIES, MakeStore, StoreFixtures, found, put

ROOM_BYTES = 64 * MIB
"""By how much the process may grow, whatever is planted."""

T = TypeVar("T")


class Planter(Protocol):
    """Whoever may write the medium."""

    def entry(self, number: int, size: int = 0) -> None:
        """An entry of the log at this number: of `size` zeros, or one whose body is whole."""
        ...

    def report(self, number: int, data: bytes | int) -> None:
        """What the replica of this number reports: these bytes, or so many zeros."""
        ...

    def metadata(self, name: str, size: int) -> None:
        """About so many bytes of metadata in the blob of that name."""
        ...


def growth_of(call: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and by how many bytes this process grew at most meanwhile."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _status("VmRSS")
    said = call()
    return said, _status("VmHWM") - before


def _status(name: str) -> int:
    line = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert line is not None
    return int(line[1]) << 10


class StoreBoundsTests(StoreFixtures):
    """Of every store with a log.

    LARGE_BYTES: of one thing that is planted. LARGE: how many such there are.
    """

    LARGE_BYTES = 64 * MIB
    LARGE = 6

    @pytest.fixture
    def planter(self) -> Planter:
        """What writes past the stores of `make_store`."""
        raise NotImplementedError("give the class a `planter` fixture")

    def goes_on(self, *stores: ObjectStore) -> None:
        """All replicas read what each of them appends, at numbers that can be honest."""
        for number, store in enumerate(stores):
            for _ in stores:
                for each in stores:
                    log_of(each).read(0)
            generation = log_of(store).append([Scope(tenant=number)], "me")
            assert 0 < generation < 1 << 53
            for each in stores:
                page = log_of(each).read(0)
                assert page.generation == generation and page.entries[-1].scopes == (Scope(tenant=number),)

    def test_large_entries_are_not_read_whole(self, store: ObjectStore, other: ObjectStore, planter: Planter) -> None:
        """Entries longer than any honest one can't be understood, and none of them is read to its end."""
        after = log_of(store).append([Scope(tenant=1)], "me")
        for number in range(self.LARGE):
            planter.entry(after + 1 + number, self.LARGE_BYTES)
        for each in (store, other):
            page, grown = growth_of(lambda each=each: log_of(each).read(0))  # type: ignore[misc]
            whole = {entry.scopes for entry in page.entries if entry.is_whole}
            assert grown < ROOM_BYTES and whole <= {(Scope(tenant=1),)}
        self.goes_on(store, other)

    @pytest.mark.parametrize("number", [1 << 62, (1 << 64) - 1])
    def test_numbers_that_can_not_be_honest(
        self, store: ObjectStore, other: ObjectStore, planter: Planter, number: int
    ) -> None:
        """An entry beyond all honest generations ends no log: replicas go on below it, and nothing they wrote is."""
        log_of(store).append([Scope(tenant=1)], "me")
        planter.entry(number)
        self.goes_on(store, other)

    def test_a_log_that_is_too_long_is_read_from_its_end(
        self, store: ObjectStore, open_store: MakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of more entries than a replica may read it reads the newest, and says that it knows none before them."""
        generations = [log_of(store).append([Scope(tenant=n)], "me") for n in range(12)]
        monkeypatch.setattr(bounds, "MAX_LOG_ENTRIES", 5)
        page = log_of(open_store(MAX_ENTRIES)).read(0)
        assert [entry.generation for entry in page.entries] == generations[-len(page.entries) :]
        assert 4 <= len(page.entries) <= 5 and page.floor == page.entries[0].generation - 1
        assert log_of(open_store(MAX_ENTRIES)).read(0).epoch == page.epoch

    def test_a_log_that_is_too_large_is_read_from_its_end(
        self, store: ObjectStore, open_store: MakeStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The same of their bytes."""
        scope = Scope(keys=frozenset(chunk.key for chunk in chain("a", 100)))
        generations = [log_of(store).append([scope], "me") for _ in range(8)]
        monkeypatch.setattr(bounds, "MAX_LOG_BYTES", 4 * 100 * 70)
        page = log_of(open_store(MAX_ENTRIES)).read(0)
        assert [entry.generation for entry in page.entries] == generations[-len(page.entries) :]
        assert 2 <= len(page.entries) <= 5 and page.floor == page.entries[0].generation - 1
        assert log_of(open_store(MAX_ENTRIES)).read(0).epoch == page.epoch

    def test_large_reports_are_not_read_whole(self, store: ObjectStore, other: ObjectStore, planter: Planter) -> None:
        """What no honest replica reports is passed over, and not read to its end; honest ones are there beside it."""
        log_of(store).report("honest", 7, 60.0)
        for number in range(self.LARGE):
            planter.report(number, self.LARGE_BYTES)
        read, grown = growth_of(log_of(other).replicas)
        assert read == {"honest": 7} and grown < ROOM_BYTES

    def test_reports_that_can_not_be_honest(self, store: ObjectStore, other: ObjectStore, planter: Planter) -> None:
        """Nobody is alive for ever, nor has read what can't be there."""
        now_s = 1_700_000_000 * 1000
        said = [f'{{"generation": {1 << 64}, "until_s": {now_s}}}', '{"generation": 1, "until_s": 1e300}']
        said += ['{"generation": -1, "until_s": NaN}', '{"generation": 1e999, "until_s": 1}', "[" * 1000]
        log_of(store).report("honest", 7, 60.0)
        for number, each in enumerate(said):
            planter.report(number, each.encode())
        assert log_of(other).replicas() == {"honest": 7}

    def test_more_reports_than_replicas(
        self, store: ObjectStore, planter: Planter, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """More reports than there can be replicas are an error: who is alive is not known."""
        log_of(store).report("honest", 7, 60.0)
        monkeypatch.setattr(bounds, "MAX_REPORTS", 20)
        for number in range(20):
            planter.report(number, b'{"generation": 1, "until_s": 1}')
        with pytest.raises(OSError):
            log_of(store).replicas()

    def test_large_metadata_is_not_read_whole(self, store: ObjectStore, other: ObjectStore, planter: Planter) -> None:
        """With more updates than there can be a chunk is a miss, or any tag takes it; nobody reads them all."""
        (chunk,) = chain("a", 1)
        put(store, chunk, 4096)
        planter.metadata(name_of(store, chunk.key), self.LARGE_BYTES)
        one, grown = growth_of(lambda: found(other, chunk))
        assert (one is None or one.terms.is_wild) and grown < ROOM_BYTES
        updates = {chunk.key: updates_of(Terms(is_wild=True), 1)}
        _, grown = growth_of(lambda: store.add_updates(updates))
        one = found(other, chunk)
        assert (one is None or one.terms.is_wild) and grown < ROOM_BYTES


def report_of(replica: str) -> str:
    """The blob with what a replica reports."""
    return f"replicas/{hashlib.sha256(replica.encode()).hexdigest()[:32]}"


def name_of(store: ObjectStore, key: ChunkKey) -> str:
    """The blob with a chunk's metadata, or the chunk itself where there are no blobs."""
    name = getattr(store, "metadata_name", None)
    return key.hex() if name is None else str(name(key))
