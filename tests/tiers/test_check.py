"""The check: it finds every chunk whose bytes are not what was stored, and nothing else."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import Chunk
from hotspan.testing.chunks import aligned, chain, content, key_of
from hotspan.testing.clock import SimulatedClock
from hotspan.testing.conformance import NAMESPACE, TERMS, invalidate, load, settle, store
from hotspan.tiers.check import check_offline
from hotspan.tiers.disk import DiskOptions, DiskTier
from kit.simulated.faults import FaultyFiles, SlowFiles
from kit.simulated.keys import FixedKeys

SIZE, SLOTS = 2 * 4096, 8
SLOT = HEADER_BYTES + SIZE
CHUNKS = chain("a", 6)
SEALED = pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])


@contextmanager
def opened(path: Path, clock: SimulatedClock | None = None, **options: Any) -> Iterator[DiskTier]:
    """A disk tier, checked and closed at the end."""
    tier = DiskTier(DiskOptions(path, SLOTS * SLOT, **options), NAMESPACE, SIZE, clock or SimulatedClock())
    try:
        yield tier
        tier.check()
    finally:
        tier.close(5.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the tier lives."""
    return tmp_path / "disk"


def flip(path: Path, at: int) -> None:
    """Flip one bit of the slab."""
    with (path / "slab").open("r+b") as slab:
        slab.seek(at)
        byte = slab.read(1)
        slab.seek(at)
        slab.write(bytes([byte[0] ^ 4]))
        slab.flush()
        os.fsync(slab.fileno())


DAMAGE: dict[str, Callable[[Path, int], None]] = {
    "magic": lambda path, slot: flip(path, slot * SLOT),
    "version": lambda path, slot: flip(path, slot * SLOT + 8),
    "header": lambda path, slot: flip(path, slot * SLOT + 300),
    "payload": lambda path, slot: flip(path, slot * SLOT + HEADER_BYTES + SIZE - 1),
}


@SEALED
@pytest.mark.parametrize("offline", [False, True], ids=["running", "offline"])
def test_each_planted_corruption_is_found(path: Path, offline: bool, sealed: bool) -> None:
    """One fault of each kind in different slots: each is counted under its name and quarantined, the rest is whole.

    What stands on a quarantined chunk goes with it, though it is whole.
    """
    damaged, rest = [chain(kind, 1)[0] for kind in DAMAGE], chain("rest", 2)
    standing = [Chunk(key_of(f"on {parent.key.hex()}"), parent.key, 1) for parent in damaged[:2]]
    everything = damaged + standing + rest

    def keys(writer: int) -> FixedKeys | None:
        return FixedKeys(writer) if sealed else None

    with opened(path, keys=keys(0)) as tier:
        for chunk in everything:
            store(tier, chunk, SIZE)
        slots = {tier.directory.table.key(slot): slot for slot in tier.directory.table.slots()}
        if not offline:
            for chunk, damage in zip(damaged, DAMAGE.values(), strict=True):
                damage(path, slots[chunk.key])
            report = tier.verification().run()
            assert tier.finished() == []
            assert [tier.lookup(chunk.key) for chunk in everything] == [False] * 6 + [True] * 2
            tier.check()
    if offline:
        for chunk, damage in zip(damaged, DAMAGE.values(), strict=True):
            damage(path, slots[chunk.key])
        report = check_offline(path, keys(1))
    assert report["corrupt"] == dict.fromkeys(DAMAGE, 1)
    assert (report["chunks"], report["whole"], report["bytes"]) == (8, 4, 4 * SIZE)
    assert (report["expired"], report["locked"], report["unreadable"]) == (0, 0, 0)
    with opened(path, keys=keys(2)) as tier:
        assert [tier.lookup(chunk.key) for chunk in everything] == [False] * 6 + [True] * 2
        assert all(load(tier, chunk.key, SIZE) is not None for chunk in rest)
    assert check_offline(path, keys(3))["corrupt"] == {}


@SEALED
def test_a_whole_directory_stays_as_it_is(path: Path, sealed: bool) -> None:
    """A check of what is whole finds it whole, and changes nothing: chunks, terms, bytes."""
    with opened(path, keys=FixedKeys(0) if sealed else None) as tier:
        for chunk in CHUNKS:
            store(tier, chunk, SIZE, terms=Terms(5, labels=tag_labels(["x"])))
    report = check_offline(path, FixedKeys(1) if sealed else None)
    assert (report["chunks"], report["whole"], report["corrupt"]) == (6, 6, {})
    with opened(path, keys=FixedKeys(2) if sealed else None) as tier:
        for chunk in CHUNKS:
            result = load(tier, chunk.key, SIZE)
            assert result is not None and result[1] == content(chunk.key, SIZE)
            assert tier.terms(chunk.key).labels == tag_labels(["x"])


def test_without_keys_sealed_chunks_are_locked(path: Path) -> None:
    """Sealed chunks whose keys can't be had, or of which the reader has none at all, are locked and stay."""
    keys = FixedKeys()
    with opened(path, keys=keys) as tier:
        for number, chunk in enumerate(CHUNKS):
            store(tier, chunk, SIZE, terms=Terms(number % 2))
        keys.shred(1)
        report = tier.verification().run()
        assert (report["whole"], report["locked"], report["corrupt"]) == (3, 3, {})
    report = check_offline(path, None)
    assert (report["whole"], report["locked"], report["corrupt"]) == (0, 6, {})
    with opened(path, keys=FixedKeys(1)) as tier:
        result = load(tier, CHUNKS[0].key, SIZE)
        assert result is not None and result[1] == content(CHUNKS[0].key, SIZE)


def test_expired_chunks_are_not_read(path: Path) -> None:
    """A chunk whose time is over is counted as expired, whatever its bytes are."""
    clock = SimulatedClock()
    with opened(path, clock) as tier:
        store(tier, CHUNKS[0], SIZE, terms=Terms(expires_s=int(clock.unix()) + 10))
        store(tier, CHUNKS[1], SIZE)
        flip(path, tier.directory.table.slots()[0] * SLOT)
        clock.advance(10)
        report = tier.verification().run()
        assert (report["expired"], report["whole"], report["corrupt"]) == (1, 1, {})


def test_what_can_not_be_read_is_not_quarantined(path: Path) -> None:
    """A disk that fails says nothing of the bytes: unreadable, and kept."""
    files = FaultyFiles()
    with opened(path, files=files) as tier:
        for chunk in CHUNKS:
            store(tier, chunk, SIZE)
        files.arm(2, kinds=["preadv"])
        report = tier.verification().run()
        assert (report["unreadable"], report["whole"], report["corrupt"]) == (1, 5, {})
        assert all(tier.lookup(chunk.key) for chunk in CHUNKS)


def test_a_chunk_that_is_being_written_is_left_alone(path: Path) -> None:
    """A store in flight while the check runs is no corruption: not counted, not quarantined, a hit afterwards."""
    files = SlowFiles(kinds=["pwritev"])
    with opened(path, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        files.hang()
        assert tier.submit_store(CHUNKS[1], TERMS, aligned(SIZE, content(CHUNKS[1].key, SIZE)))
        files.wait_hanging()
        report = tier.verification().run()
        assert (report["chunks"], report["whole"], report["corrupt"]) == (1, 1, {})
        files.release()
        settle(tier, 1)
        result = load(tier, CHUNKS[1].key, SIZE)
        assert result is not None and result[1] == content(CHUNKS[1].key, SIZE)


def test_a_chunk_replaced_while_it_is_read_is_left_alone(path: Path) -> None:
    """If a slot changes hands during its read, the check says nothing of it, and its new chunk stays."""
    files = SlowFiles(kinds=["preadv"])
    with opened(path, files=files) as tier:
        store(tier, CHUNKS[0], SIZE)
        files.hang()
        check = tier.verification()
        reports: list[dict[str, Any]] = []
        thread = threading.Thread(target=lambda: reports.append(check.run()))
        thread.start()
        files.wait_hanging()
        tier.discard(CHUNKS[0].key)
        tier.check()
        store(tier, CHUNKS[0], SIZE, version=1)
        files.release()
        thread.join()
        assert (reports[0]["chunks"], reports[0]["corrupt"]) == (0, {})
        result = load(tier, CHUNKS[0].key, SIZE)
        assert result is not None and result[1] == content(CHUNKS[0].key, SIZE, 1)


def test_a_check_beside_a_busy_tier_finds_nothing(path: Path) -> None:
    """Checks that run while chunks are stored, discarded, invalidated and evicted report no corruption."""
    with opened(path) as tier:
        stop, found = threading.Event(), []

        def check_on() -> None:
            while not stop.is_set():
                found.append(tier.verification().run()["corrupt"])

        thread = threading.Thread(target=check_on)
        thread.start()
        try:
            deadline = time.monotonic() + 60
            for n in itertools.takewhile(lambda n: n < 60 or len(found) <= 3, itertools.count()):
                assert time.monotonic() < deadline, "no check ends"
                for chunk in chain(str(n % 5), 4):
                    store(tier, chunk, SIZE, version=n)
                if n % 3 == 0:
                    tier.discard(chain(str(n % 5), 4)[3].key)
                if n % 7 == 0:
                    invalidate(tier, Scope())
        finally:
            stop.set()
            thread.join()
        assert not any(found)


def test_a_check_offline_applies_the_log(path: Path) -> None:
    """What was invalidated is not counted, and stays forgotten."""
    with opened(path) as tier:
        for chunk in CHUNKS:
            store(tier, chunk, SIZE)
        invalidate(tier, Scope(keys=frozenset([CHUNKS[2].key])))
    assert check_offline(path, None)["chunks"] == 2


def test_what_is_no_directory_is_refused(path: Path) -> None:
    """A path with no table, a damaged one or one in use is a DirectoryError, and nothing is made or changed."""
    with pytest.raises(DirectoryError, match="no table"):
        check_offline(path, None)
    assert not path.exists()
    with opened(path) as tier:
        store(tier, CHUNKS[0], SIZE)
        with pytest.raises(DirectoryError, match="in use"):
            check_offline(path, None)
    table = (path / "table").read_bytes()
    (path / "table").write_bytes(b"?" + table[1:])
    with pytest.raises(DirectoryError, match="damaged"):
        check_offline(path, None)
    assert (path / "table").read_bytes()[1:] == table[1:]
    (path / "table").unlink()
    (path / "table").symlink_to(path / "slab")
    with pytest.raises(DirectoryError):
        check_offline(path, None)
