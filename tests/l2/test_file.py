"""The store in a directory: the kit on real file systems, and what only a directory can do to it."""

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import ConfigError
from hotspan.core.frame import HEADER_BYTES
from hotspan.core.terms import Scope, Terms, tag_labels
from hotspan.core.types import GIB, MIB, Chunk
from hotspan.l2.base import PREAMBLE_BYTES, StoreUsage, updates_of
from hotspan.l2.file import FileStore
from hotspan.l2.file_room import OBJECTS
from hotspan.l2.log import pack_entry
from hotspan.l2.metadata import MAX_UPDATES, pack_updates
from hotspan.l2.options import FileOptions
from hotspan.l2.shared_files import SharedFiles
from hotspan.testing.chunks import aligned, chain
from hotspan.testing.clock import SimulatedClock
from kit.waiting import PATIENCE_S, at_last, until
from tests.l2.kit.bounds import StoreBoundsTests, report_of
from tests.l2.kit.logs import SharedLogTests
from tests.l2.kit.names import StoreNamesTests
from tests.l2.kit.races import SharedStoreTests
from tests.l2.kit.stores import TERMS, MakeStore, found, frame_of, put, read
from tests.l2.test_shared_files import no_links
from tests.tiers.mounts import mounted

SIZE = 4096
STORED = PREAMBLE_BYTES + HEADER_BYTES + SIZE
"""Bytes of an object with a payload of SIZE."""

(A,) = chain("a", 1)
(B,) = chain("b", 1)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "l2"


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """On tmpfs."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def store(root: Path) -> Iterator[FileStore]:
    store = FileStore(root, FileOptions(timeout_s=PATIENCE_S))
    yield store
    store.close()


class TestFileStore(SharedStoreTests, StoreNamesTests):
    """On a disk."""

    @pytest.fixture
    def make_store(self, root: Path) -> MakeStore:
        return lambda entries: FileStore(root, FileOptions(timeout_s=PATIENCE_S, log_entries=entries))


class FilePlanter:
    """Sparse files, which take no room on the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def entry(self, number: int, size: int = 0) -> None:
        (log,) = (self._root / "log").iterdir()
        self._write(log / f"{number:016x}", size or b"E" + pack_entry([Scope()], "somebody"))

    def report(self, number: int, data: bytes | int) -> None:
        name, zeros = report_of(f"replica {number}"), data if isinstance(data, int) else b""
        self._write(self._root / name, zeros or f"replica {number}".encode() + b"\0" + bytes(data))

    def metadata(self, name: str, size: int) -> None:
        directory = self._root / OBJECTS / Path(name).parts[1] / Path(name).name
        for number in range(5 * MAX_UPDATES):
            (directory / f"{number:048x}").touch()

    def _write(self, path: Path, what: int | bytes) -> None:
        with path.open("wb") as file:
            file.write(b"E" if isinstance(what, int) else what)
            if isinstance(what, int):
                file.truncate(what)


class TestFileStoreBounds(StoreBoundsTests):
    """On a disk."""

    LARGE = 24

    @pytest.fixture
    def make_store(self, root: Path) -> MakeStore:
        return lambda entries: FileStore(root, FileOptions(timeout_s=PATIENCE_S, log_entries=entries))

    @pytest.fixture
    def planter(self, root: Path) -> FilePlanter:
        return FilePlanter(root)


class TestFileStoreWithoutLinks(SharedLogTests):
    """On tmpfs, as if it had no links, what is decided by a link elsewhere: who gets a name."""

    test_the_first_put_stays = SharedStoreTests.test_the_first_put_stays
    test_of_several_puts_at_once_one_wins = SharedStoreTests.test_of_several_puts_at_once_one_wins
    test_nobody_sees_half_an_object = SharedStoreTests.test_nobody_sees_half_an_object
    test_a_delete_during_a_put_leaves_all_or_nothing = SharedStoreTests.test_a_delete_during_a_put_leaves_all_or_nothing

    @pytest.fixture
    def make_store(self, memory_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        monkeypatch.setattr(os, "link", no_links)
        return lambda entries: FileStore(memory_path, FileOptions(timeout_s=PATIENCE_S, log_entries=entries))


@pytest.mark.parametrize("is_listed", [False, True])
def test_what_is_put_during_a_look_is_counted_once(
    store: FileStore, monkeypatch: pytest.MonkeyPatch, is_listed: bool
) -> None:
    """Whether the look came by before or after it."""
    room, names = store.blobs.room, SharedFiles.listed
    store.log.read(0)

    def put_meanwhile(files: SharedFiles, path: Path, limit: int) -> list[str]:
        if path.parts[0] != OBJECTS:
            return names(files, path, limit)
        monkeypatch.setattr(SharedFiles, "listed", names)
        found = [] if is_listed else names(files, path, limit)  # the look's first: nothing is there yet
        assert put(store, B, SIZE)
        return names(files, path, limit) if is_listed else found

    store.blobs.calls.run(room.look)
    monkeypatch.setattr(SharedFiles, "listed", put_meanwhile)
    assert store.blobs.calls.run(room.look) == store.usage() == StoreUsage(1, STORED, 0, 0)
    assert put(store, A, SIZE)
    assert store.usage() == StoreUsage(2, 2 * STORED, 0, 0) == store.blobs.calls.run(room.look)


@pytest.mark.parametrize("options", [{"timeout_s": 0.0}, {"capacity_gib": 0.0}, {"capacity_gib": -1.0}])
def test_what_can_not_work_is_refused(root: Path, options: dict[str, float]) -> None:
    """Settings without sense raise ConfigError, and touch nothing."""
    with pytest.raises(ConfigError):
        FileStore(root, FileOptions(**options))  # type: ignore[arg-type]
    assert not root.exists()


# -- what lies where -----------------------------------------------------------------------------------------------


def objects_in(root: Path) -> list[Path]:
    return sorted(root.glob("objects/*/*/object"))


def test_objects_lie_where_the_head_of_the_file_says(root: Path, store: FileStore) -> None:
    """An object is record, life, padding and frame in one file; its metadata is names beside it; nobody else may read
    them."""
    put(store, A, SIZE)
    update = updates_of(Terms(labels=frozenset([5])), 9)[0]
    store.add_updates({A.key: [update]})
    (path,) = objects_in(root)
    name = A.key.hex()
    assert path.relative_to(root).parts[2:] == (name, "object")
    data = path.read_bytes()
    assert len(data) == STORED and not any(data[272:PREAMBLE_BYTES]) and data[PREAMBLE_BYTES:] == frame_of(A.key, SIZE)
    assert sorted(os.listdir(path.parent)) == [pack_updates([update]).hex(), "object"]
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0


def test_names_that_are_no_updates_are_passed_over(root: Path, store: FileStore) -> None:
    """What else lies in an object's directory, a claim or a file of somebody's, changes nothing."""
    put(store, A, SIZE)
    (path,) = objects_in(root)
    for name in ("object.claim", ".nfs0001", "abc", "README"):
        (path.parent / name).touch()
    one = found(store, A)
    assert one is not None and one.terms == TERMS
    store.delete([A.key])
    assert objects_in(root) == [] and os.listdir(root / "tmp") == []


# -- a place that fails --------------------------------------------------------------------------------------------


def test_a_pipe_is_no_object(root: Path, store: FileStore) -> None:
    """A pipe in the place of an object is a miss, and nobody waits for its writer."""
    put(store, A, SIZE)
    one, (path,) = found(store, A), objects_in(root)
    path.unlink()
    os.mkfifo(path)
    assert one is not None and not store.get(one, [aligned(HEADER_BYTES + SIZE)]) and found(store, A) is None


def test_a_file_that_hangs_holds_nobody(root: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A find and a get that the file system never answers raise TimeoutError in time; others go on meanwhile."""
    quick = FileStore(root, FileOptions(timeout_s=0.3))
    put(store, A, SIZE)
    put(store, B, SIZE)
    one = found(store, A)
    answered, opens = threading.Event(), os.open

    def hang(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == "object" and os.readlink(f"/proc/self/fd/{dir_fd}").endswith(A.key.hex()):
            answered.wait(PATIENCE_S)
        return opens(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", hang)
    into = aligned(HEADER_BYTES + SIZE)
    assert one is not None
    for call in (lambda: quick.find([A.key]), lambda: quick.get(one, [into])):
        with pytest.raises(TimeoutError):
            call()
        assert at_last(lambda: read(quick, found(quick, B))) == frame_of(B.key, SIZE)
    answered.set()
    assert not any(into)
    quick.close()


def test_a_full_disk_takes_nothing_and_makes_room(tmp_path: Path) -> None:
    """A put that finds no room raises OSError and leaves nothing; some objects go, so that later ones fit."""
    with mounted(tmp_path / "small", "tmpfs", "size=16m") as path:
        store = FileStore(path)
        chunks = [chain(f"{n}", 1)[0] for n in range(20)]
        put_all(store, chunks[:1], MIB)
        with pytest.raises(OSError) as failed:
            put_all(store, chunks[1:], MIB)
        assert failed.value.errno == errno.ENOSPC
        (late,) = chain("late", 1)
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                assert put(store, late, MIB)
                break
            except OSError:
                assert time.monotonic() < deadline
        assert read(store, found(store, late)) == frame_of(late.key, MIB)
        assert 3 < sum(there(store, chunks)) < 15
        for chunk in chunks:
            assert read(store, found(store, chunk)) in (None, frame_of(chunk.key, MIB))
        store.close()


def test_a_directory_with_as_many_chunks_as_it_may_have_makes_room(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system may limit the directories in one directory: the put raises EMLINK, some objects go, others fit."""
    chunks, mkdir = [chain(f"{n}", 1)[0] for n in range(11)], os.mkdir

    def limited(path: str, mode: int, *, dir_fd: int) -> None:
        if len(path) == 2 * len(A.key) and len(os.listdir(dir_fd)) == 10:
            raise OSError(errno.EMLINK, os.strerror(errno.EMLINK))
        mkdir(path, mode, dir_fd=dir_fd)

    def swept() -> None:
        assert store.blobs.sweeper is not None
        store.blobs.sweeper.join()

    put_all(store, chunks[:10])
    swept()
    monkeypatch.setattr(os, "mkdir", limited)
    with pytest.raises(OSError) as failed:
        put(store, chunks[10], SIZE)
    assert failed.value.errno == errno.EMLINK
    swept()
    assert put(store, chunks[10], SIZE) and sum(there(store, chunks)) == 10


def put_all(store: FileStore, chunks: Sequence[Chunk], size: int = SIZE) -> None:
    for chunk in chunks:
        assert put(store, chunk, size)


def test_a_directory_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    """Where a file stands in the place of the directory every method raises OSError."""
    (tmp_path / "l2").touch()
    store = FileStore(tmp_path / "l2")
    for call in (lambda: store.find([A.key]), lambda: put(store, A, SIZE), lambda: store.log.append([Scope()], "me")):
        with pytest.raises(OSError):
            call()
    store.close()


def test_a_directory_that_was_emptied_begins_anew(root: Path, store: FileStore) -> None:
    """When somebody deletes everything the next call finds a new epoch above the old one, and all works."""
    put(store, A, SIZE)
    generation = store.log.append([Scope(tenant=1)], "me")
    before = store.log.read(generation)
    time.sleep(0.005)  # a floor is a time in milliseconds
    shutil.rmtree(root)
    page = store.log.read(generation)
    assert page.epoch != before.epoch and page.floor > generation
    assert found(store, A) is None and put(store, A, SIZE) and found(store, A) is not None
    assert store.log.append([Scope()], "me") > page.floor


WRITER = """
import sys
from hotspan.testing.chunks import chain
from tests.l2.kit.stores import put
from hotspan.l2.file import FileStore
from hotspan.l2.log import checked
from hotspan.l2.metadata import pack_updates
store = FileStore(sys.argv[1])
for n in range(10**6):
    put(store, chain(str(n), 1)[0], 1 << 20)
    print(n, flush=True)
"""


def test_a_writer_that_is_killed_leaves_no_half_object(root: Path, store: FileStore) -> None:
    """After a kill in the middle of puts every object that is found is whole, and what was acknowledged is there."""
    for _ in range(2):
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(root)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        last = [int(writer.stdout.readline()) for _ in range(5)][-1]
        writer.kill()
        writer.wait(PATIENCE_S)
        writer.stdout.close()
        for n in range(last + 20):
            (chunk,) = chain(f"{n}", 1)
            one = found(store, chunk)
            assert one is None or read(store, one) == frame_of(chunk.key, MIB)
            assert one is not None or n > last
            store.delete([chunk.key])


# -- the log -------------------------------------------------------------------------------------------------------


def test_an_entry_goes_to_the_epoch_that_holds(root: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry that is written while a new epoch begins is in the new one when the append returns."""
    other, link = FileStore(root), os.link
    before = store.log.append([Scope()], "me")
    ended: list[int] = []

    def end_first(source: str, target: str, *, dst_dir_fd: int, **options: Any) -> None:
        if Path(os.readlink(f"/proc/self/fd/{dst_dir_fd}")).parent.name == "log" and not ended:
            ended.append(0)
            ended[0] = other.log.read(before + 1000).floor
        link(source, target, dst_dir_fd=dst_dir_fd, **options)

    monkeypatch.setattr(os, "link", end_first)
    generation = store.log.append([Scope(tenant=1)], "me")
    page = other.log.read(0)
    assert [entry.generation for entry in page.entries] == [generation] and generation > page.floor == ended[0]
    other.close()


def test_an_acknowledged_entry_was_synced(root: Path, store: FileStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before an append returns, the entry's bytes were synced, then its name in the directory."""
    store.log.append([Scope()], "me")
    synced: list[bool] = []
    sync = os.fsync

    def spy(fd: int) -> None:
        synced.append(os.path.isdir(f"/proc/self/fd/{fd}"))
        sync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    store.log.append([Scope()], "me")
    assert synced == [False, True]


# -- room ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock() -> SimulatedClock:
    return SimulatedClock(unix_s=time.time())


def opened(root: Path, clock: SimulatedClock, objects: float = 0) -> FileStore:
    """A store with room for so many objects; 0 for any number."""
    return FileStore(root, FileOptions(timeout_s=PATIENCE_S, capacity_gib=objects * STORED / GIB or None), clock=clock)


def there(store: FileStore, chunks: Sequence[Chunk]) -> list[bool]:
    return [found(store, chunk) is not None for chunk in chunks]


def test_what_was_not_used_goes_first(root: Path, clock: SimulatedClock) -> None:
    """When there is too much the objects go that were put or read longest ago, until a tenth is free: evicted."""
    store = opened(root, clock, 10.5)
    chunks = [chain(f"{n}", 1)[0] for n in range(10)]
    for chunk in chunks:
        put(store, chunk, SIZE)
        clock.advance(100)
    assert read(store, found(store, chunks[0])) is not None
    found(store, chunks[1])  # looking is not using
    store.blobs.sweep()
    assert all(there(store, chunks))
    put_all(store, chain("more", 1))
    until(lambda: store.usage() == StoreUsage(9, 9 * STORED, int(10.5 * STORED), 2))
    assert there(store, chunks) == [True, False, False, *[True] * 7]
    store.close()


def test_what_is_put_during_a_sweep_is_swept_after_it(
    root: Path, clock: SimulatedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that has seen all objects does not hold off the next one, which is due meanwhile."""
    store = opened(root, clock, 10.5)
    sweep, seen, ends = store.blobs.sweep, threading.Event(), threading.Event()

    def long(*, is_full: bool = False) -> None:
        sweep(is_full=is_full)
        seen.set()
        assert ends.wait(60)

    monkeypatch.setattr(store.blobs, "sweep", long)
    store.blobs.sweep_soon()
    assert seen.wait(60)
    for number in range(11):
        put(store, chain(f"{number}", 1)[0], SIZE)
    ends.set()
    assert store.blobs.sweeper is not None
    store.blobs.sweeper.join(60)
    assert store.usage().objects == 9
    store.close()


def test_of_one_text_the_end_goes_first(root: Path, clock: SimulatedClock) -> None:
    """Of what was put or read together, chunks that others stand on stay longest."""
    store = opened(root, clock)
    used, unused = chain("used", 10), chain("unused", 10)
    put_all(store, [*unused, *used])
    clock.advance(1000)
    for one in store.find([chunk.key for chunk in used]):
        assert read(store, one) is not None
    store.close()
    store = opened(root, clock, 15)
    store.blobs.sweep()
    assert there(store, used) == [True] * 10
    left = sum(there(store, unused))
    assert left == 3 and there(store, unused) == [True] * left + [False] * (10 - left)
    store.close()


def test_what_others_put_counts(root: Path, clock: SimulatedClock) -> None:
    """A store that puts looks from time to time at what others put, and makes room."""
    store, other = opened(root, clock, 10), opened(root, clock)
    put_all(store, chain("a", 1))
    until(lambda: store.blobs.room.usage is not None)
    put_all(other, [chain(f"{n}", 1)[0] for n in range(20)])
    put_all(store, chain("b", 1))
    clock.advance(400)
    put_all(store, chain("c", 1))
    until(lambda: len(objects_in(root)) <= 9)
    store.close()
    other.close()


def test_writers_that_fill_a_directory_together_look_at_it(root: Path, clock: SimulatedClock) -> None:
    """Four writers that begin with an empty directory keep about what it may hold, not four times as much."""
    stores, most = [opened(root, clock, 40) for _ in range(4)], 0
    for n in range(160):
        store = stores[n % 4]
        put_all(store, chain(f"{n}", 1))
        if store.blobs.sweeper is not None:
            store.blobs.sweeper.join()
        most = max(most, len(objects_in(root)))
    assert 40 < most <= 60
    for store in stores:
        store.close()


def test_usage_is_that_of_all(root: Path, clock: SimulatedClock) -> None:
    """What is there counts, whoever put it, as of the first question; then what was put here."""
    store, other = opened(root, clock), opened(root, clock)
    put_all(other, [A, B])
    assert store.usage() == StoreUsage(2, 2 * STORED, 0, 0)
    put_all(store, chain("c", 1))
    assert store.usage() == StoreUsage(3, 3 * STORED, 0, 0)
    store.close()
    other.close()


def test_what_was_left_behind_goes_after_a_while(root: Path, clock: SimulatedClock) -> None:
    """What nobody finished and old epochs are deleted after an hour, unused updates after a day; not before."""
    store = opened(root, clock)
    put(store, A, SIZE)
    store.add_updates({B.key: updates_of(TERMS, 9)})
    store.log.append([Scope()], "me")
    store.log.read(store.log.read(0).generation + 1000)
    put(store, A, SIZE, version=1)
    store.add_updates({B.key: updates_of(TERMS, 9)})
    store.log.append([Scope()], "me")
    (root / "tmp" / "left").write_bytes(b"half")
    (root / "tmp" / "gone").mkdir()
    (root / "tmp" / "gone" / "object").touch()
    counts = []
    for _ in range(4):
        store.blobs.sweep()
        updates_alone = [path for path in root.glob(f"objects/*/{B.key.hex()}") if path.is_dir()]
        entries = len(list(root.glob("log/*/*")))
        counts.append((len(objects_in(root)), entries, len(updates_alone), len(os.listdir(root / "tmp"))))
        clock.advance({1: 3500, 2: 200, 3: 86400}.get(len(counts), 0))
    assert counts == [(2, 4, 2, 2), (2, 4, 2, 2), (1, 2, 1, 0), (1, 2, 0, 0)]
    one = found(store, A)
    assert one is not None and read(store, one) == frame_of(A.key, SIZE, version=1)
    assert len(store.log.read(0).entries) == 1
    store.add_updates({B.key: updates_of(Terms(labels=tag_labels(["new"])), 9)})
    assert put(store, B, SIZE)
    store.close()
