"""A disk tier's directory: owned by one process, and every way in which it can't be used says what to do."""

import contextlib
import errno
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from hotspan.core.errors import DirectoryError
from hotspan.core.terms import Scope, Terms
from hotspan.core.types import MIB, ChunkKey
from hotspan.l2.base import LogPosition
from hotspan.l2.position import write_position
from hotspan.testing.chunks import key_of
from hotspan.tiers.directory import check_directory, open_directory, remove_directory, replica_directory
from hotspan.tiers.files import Files
from hotspan.tiers.log import Invalidation
from hotspan.tiers.record import Record
from hotspan.tiers.table import DiskTable
from kit.simulated.faults import SHORT, FaultyFiles, slots_bytes

from .mounts import mounted

SLOT = 8192
HOLD = """
import sys
from pathlib import Path
from hotspan.tiers.directory import open_directory
held = open_directory(Path(sys.argv[1]), 8192, 8 * 8192)
print("held", flush=True)
sys.stdin.read()
"""


def record(name: str, parent: str | None = None, **terms: Any) -> Record:
    """A record that a test calls `name`."""
    return Record(key_of(name), None if parent is None else key_of(parent), bytes(32), 4096, Terms(**terms))


def contents(table: DiskTable) -> dict[int, Record]:
    """All records in memory."""
    return {slot: table.record(slot) for slot in table.slots()}


def filled(path: Path, *records: Record, invalidations: Sequence[Invalidation] = ()) -> None:
    """A directory with these records in its slots, and then these invalidations in its log, applied to nothing."""
    held = open_directory(path, SLOT, 8 * SLOT)
    for slot, one in enumerate(records):
        held.table.put(slot, one)
    held.table.flush()
    for entry in invalidations:
        held.log.append(entry)
    held.close()


def names(path: Path, **options: Any) -> set[ChunkKey]:
    """The keys of what a new process finds."""
    held = open_directory(path, SLOT, 8 * SLOT, **options)
    found = {one.key for one in contents(held.table).values()}
    held.close()
    return found


def test_another_process_is_named(tmp_path: Path) -> None:
    """A directory that another process owns is refused with that process's number, and free once it died."""
    path = tmp_path / "disk"
    command = [sys.executable, "-c", HOLD, str(path)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    for attempt in (lambda: open_directory(path, SLOT, 8 * SLOT), lambda: check_directory(path, 8 * SLOT)):
        with pytest.raises(DirectoryError, match=rf"in use by process {process.pid}\b.*another"):
            attempt()
    process.kill()
    process.wait()
    open_directory(path, SLOT, 8 * SLOT).close()


def test_the_same_process_can_not_open_it_twice(tmp_path: Path) -> None:
    """Two tiers of one process can't share a directory either; after `close` it is free."""
    held = open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    with pytest.raises(DirectoryError, match=f"in use by process {os.getpid()}"):
        open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    held.close()
    open_directory(tmp_path / "disk", SLOT, 8 * SLOT).close()


def test_modes(tmp_path: Path) -> None:
    """The directory is 0700 and its files are 0600, whatever the umask, also when the directory was there before."""
    (tmp_path / "old").mkdir(mode=0o777)
    umask = os.umask(0)
    try:
        for name in ("new", "old"):
            open_directory(tmp_path / name, SLOT, 8 * SLOT).close()
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700
            files = {p.name: stat.S_IMODE(p.stat().st_mode) for p in (tmp_path / name).iterdir()}
            assert files == {"lock": 0o600, "table": 0o600, "slab": 0o600, "log": 0o600}
    finally:
        os.umask(umask)


def test_all_space_is_taken_at_the_start(tmp_path: Path) -> None:
    """The slab's blocks are allocated when the directory is opened."""
    held = open_directory(tmp_path / "disk", SLOT, 100 * SLOT)
    assert os.fstat(held.slab_fd).st_blocks * 512 >= 100 * SLOT == os.fstat(held.slab_fd).st_size
    assert held.direct
    held.close()


def test_a_read_only_file_system_is_explained(tmp_path: Path) -> None:
    """On a read-only file system the error says so and names --disk."""
    with mounted(tmp_path / "ro", "tmpfs", "ro,size=4m") as mount:
        for attempt in (lambda: open_directory(mount, SLOT, 8 * SLOT), lambda: check_directory(mount, 8 * SLOT)):
            with pytest.raises(DirectoryError, match=r"read-only.*--disk"):
                attempt()


def test_a_full_file_system_is_explained(tmp_path: Path) -> None:
    """Where the slab does not fit, the error gives both figures and --disk-gib, and the space is not used up."""
    with mounted(tmp_path / "small", "tmpfs", "size=2m") as mount:
        for attempt in (lambda: open_directory(mount, SLOT, 64 * MIB), lambda: check_directory(mount, 64 * MIB)):
            with pytest.raises(DirectoryError, match=r"0\.00 GiB free and needs 0\.06 GiB.*--disk-gib"):
                attempt()
        open_directory(mount, SLOT, MIB).close()


def test_a_quota_that_bites_late_gives_the_space_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the allocation itself fails, the error names --disk-gib and what was allocated is given back."""
    path = tmp_path / "disk"
    open_directory(path, SLOT, 8 * SLOT).close()
    real = os.posix_fallocate

    def fallocate(fd: int, at: int, length: int) -> None:
        real(fd, at, length // 2)
        raise OSError(errno.EDQUOT, "quota")

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(DirectoryError, match=r"quota.*--disk-gib"):
        open_directory(path, SLOT, 800 * SLOT)
    status = os.stat(path / "slab")
    assert slots_bytes(status, SLOT) == 8 * SLOT == status.st_size


def test_a_file_in_its_place_is_explained(tmp_path: Path) -> None:
    """A path that is a file, or leads through one, is refused and stays as it is."""
    file = tmp_path / "disk"
    file.write_text("mine")
    for path in (file, file / "below"):
        with pytest.raises(DirectoryError, match=r"not a directory.*--disk"):
            open_directory(path, SLOT, 8 * SLOT)
    assert file.read_text() == "mine"


def test_a_directory_of_others_is_left_alone(tmp_path: Path) -> None:
    """A directory with foreign files is refused by name and nothing is written into it."""
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(DirectoryError, match=r"thesis\.tex.*empty directory"):
        open_directory(tmp_path, SLOT, 8 * SLOT)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_directory_is_removed_with_those_of_its_replicas(tmp_path: Path) -> None:
    """What a server left is removed, and how much that was is said; one that holds replicas' goes with them."""
    for path in (tmp_path / "one", tmp_path / "both" / "replica-0", tmp_path / "both" / "replica-1"):
        open_directory(path, SLOT, 8 * SLOT).close()
        assert write_position(path, LogPosition(b"epoch", 7))  # how far a shared log was followed is the tier's, too
    assert remove_directory(tmp_path / "one") >= 8 * SLOT
    assert remove_directory(tmp_path / "both") >= 16 * SLOT
    assert not list(tmp_path.iterdir())


def test_only_what_is_ours_and_unused_is_removed(tmp_path: Path) -> None:
    """A directory in use, one with other files and one that is no tier's are refused, and nothing of them is gone."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "lock").write_text("mine")
    open_directory(tmp_path / "mixed", SLOT, 8 * SLOT).close()
    (tmp_path / "mixed" / "thesis.tex").write_text("mine")
    open_directory(tmp_path / "both" / "idle", SLOT, 8 * SLOT).close()
    used = open_directory(tmp_path / "both" / "used", SLOT, 8 * SLOT)
    before = sorted(tmp_path.rglob("*"))
    refusals = {"mine": "no disk tier's", "no": "no disk", "mixed": r"thesis\.tex", "both": "in use"}
    for name, why in refusals.items():
        with pytest.raises(DirectoryError, match=why):
            remove_directory(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    used.close()


def test_what_only_has_our_names_is_not_removed(tmp_path: Path) -> None:
    """A directory whose files have the names of a tier's, and what a link leads to, are somebody else's."""
    (tmp_path / "theirs").mkdir()
    for name in ("table", "log"):
        (tmp_path / "theirs" / name).write_text("customers" * 1000)
    with pytest.raises(DirectoryError, match="no disk tier's"):
        remove_directory(tmp_path / "theirs")
    for path in (tmp_path / "other", tmp_path / "mine" / "replica-0"):
        open_directory(path, SLOT, 8 * SLOT).close()
    (tmp_path / "mine" / "link").symlink_to(tmp_path / "other")
    remove_directory(tmp_path / "mine")
    assert sorted(each.name for each in (tmp_path / "theirs").iterdir()) == ["log", "table"]
    assert {"table", "slab", "log"} <= {each.name for each in (tmp_path / "other").iterdir()}
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["link"]


def test_links_are_not_followed(tmp_path: Path) -> None:
    """A slab that is a symbolic link is refused, and what it points to is not written."""
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "slab").symlink_to(target)
    with pytest.raises(DirectoryError):
        open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert target.read_text() == "mine"


def test_a_directory_made_for_other_slots_is_taken_unless_they_are_much_smaller(tmp_path: Path) -> None:
    """A chunk may take up to 64 slots of a directory that was made for others; one that needs more is refused."""
    path, many = tmp_path / "disk", 65 * SLOT
    open_directory(path, SLOT, 8 * SLOT).close()
    with pytest.raises(DirectoryError, match=rf"slots of {SLOT} bytes.*{many}.*another directory"):
        open_directory(path, many, 2 * many)
    held = open_directory(path, 64 * SLOT, 64 * SLOT)
    assert (held.geometry.slot_bytes, held.geometry.slots) == (SLOT, 64)
    held.close()
    held = open_directory(path, SLOT // 2, 8 * SLOT)
    assert (held.geometry.slot_bytes, held.geometry.slots) == (SLOT, 8)
    held.close()


def test_less_than_one_slot_is_refused(tmp_path: Path) -> None:
    """A --disk-gib that holds no chunk is refused."""
    with pytest.raises(DirectoryError, match="--disk-gib"):
        open_directory(tmp_path / "disk", SLOT, SLOT - 1)


@pytest.mark.parametrize("slots", [4, 8, 32])
def test_growing_and_shrinking_keep_what_fits(tmp_path: Path, slots: int) -> None:
    """With another size the records and bytes of the slots that remain stay, and the files have the new size."""
    held = open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    for slot in (1, 6):
        held.table.put(slot, record(str(slot)))
        held.table.write(slot)
        os.pwrite(held.slab_fd, memoryview(_page(slot)), slot * SLOT)
    held.close()
    held = open_directory(tmp_path / "disk", SLOT, slots * SLOT)
    expected = {slot: record(str(slot)) for slot in (1, 6) if slot < slots}
    assert contents(held.table) == expected
    assert os.fstat(held.slab_fd).st_size == slots * SLOT
    for slot in expected:
        page = _page(0)
        os.preadv(held.slab_fd, [page], slot * SLOT)
        assert bytes(page) == bytes([slot]) * 4096
    held.close()


def _page(fill: int) -> Any:
    import mmap

    page = mmap.mmap(-1, 4096)
    page[:] = bytes([fill]) * 4096
    return page


def test_without_direct_io_it_is_buffered_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On a real file system without O_DIRECT (ramfs) the slab works buffered, and one warning says so."""
    with mounted(tmp_path / "ramfs", "ramfs") as mount:
        held = open_directory(mount, SLOT, 8 * SLOT)
        assert not held.direct
        assert os.pwrite(held.slab_fd, b"odd", 1) == 3
        held.close()
    assert ["disk_not_direct" in entry.getMessage() for entry in caplog.records] == [True]


def _refuse_open(flags_refused: int) -> Callable[..., int]:
    real = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & flags_refused:
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *rest, **named)

    return refuse


def _refuse_read(*_: Any) -> int:
    raise OSError(errno.EINVAL, "no direct reads")


@pytest.mark.parametrize("where", ["open", "preadv"])
def test_a_refusal_of_direct_io_at_open_or_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Whether a file system refuses the flag or the first read with EINVAL, the slab falls back and leaks nothing."""
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, where, _refuse_open(os.O_DIRECT) if where == "open" else _refuse_read)
    held = open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert not held.direct
    held.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("state", ["new", "old", "invalidated"])
@pytest.mark.parametrize("error", [errno.EIO, errno.EMFILE, SHORT], ids=["eio", "emfile", "short"])
def test_whichever_call_fails_is_a_directory_error(tmp_path: Path, error: int, state: str) -> None:
    """Any of all system calls of an opening may fail: that is a DirectoryError that leaks no descriptor, unless trying
    again helped and nothing is lost; the next opening finds what was there, less what was invalidated, or nothing."""
    nth, hits = 0, 1
    while hits:
        nth += 1
        path, files = tmp_path / f"{nth}", FaultyFiles()
        entries = [Invalidation(1, (Scope(tenant=1),), 0.0)] if state == "invalidated" else []
        if state != "new":
            filled(path, record("a", tenant=1), record("b", tenant=2), invalidations=entries)
        before = len(os.listdir("/proc/self/fd"))
        files.arm(nth, error)
        expected = {"new": [], "old": ["a", "b"], "invalidated": ["b"]}[state]
        try:
            held = open_directory(path, SLOT, 8 * SLOT, files=files)
        except DirectoryError as refusal:
            assert str(path) in str(refusal)
        else:
            found = {held.table.key(slot) for slot in held.table.slots()}
            held.close()
            is_whole = found == {key_of(name) for name in expected}
            assert error == SHORT or not files.hits or is_whole, f"call {nth} failed and nobody noticed"
        hits = files.hits
        assert len(os.listdir("/proc/self/fd")) == before and not files.open_fds
        assert names(path) in ({key_of(name) for name in expected}, set()), f"call {nth}"
    assert nth > 15


@pytest.mark.parametrize("call", ["statvfs"])
def test_a_file_system_that_says_nothing_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """EIO from what is asked of the file system is a DirectoryError, and no descriptor stays open."""
    before = len(os.listdir("/proc/self/fd"))

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(DirectoryError, match="Input/output error"):
            open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert len(os.listdir("/proc/self/fd")) == before
    open_directory(tmp_path / "disk", SLOT, 8 * SLOT).close()


def test_a_lock_that_fails_is_not_blamed_on_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without locks is reported as that, not as a directory in use."""
    import fcntl

    def fail(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(DirectoryError, match="No locks available"):
        open_directory(tmp_path / "disk", SLOT, 8 * SLOT)
    assert len(os.listdir("/proc/self/fd")) == before


# -- what was invalidated ------------------------------------------------------------------------------------------


def test_the_log_is_applied(tmp_path: Path) -> None:
    """What the log says was invalidated is not found, with what stands on it; what is newer or others' is."""
    path = tmp_path / "disk"
    filled(
        path,
        record("old", tenant=1, generation=1),
        record("child", "old", tenant=2, generation=1),
        record("grandchild", "child", tenant=2, generation=2),
        record("other", tenant=2, generation=1),
        record("new", tenant=1, generation=3),
        invalidations=[Invalidation(3, (Scope(tenant=1),), 0.0)],
    )
    for _ in range(2):
        assert names(path) == {key_of("other"), key_of("new")}


def test_each_entry_is_applied_to_what_was_there_before(tmp_path: Path) -> None:
    """Each invalidation takes chunks of generations below its own; the same scope again takes later ones."""
    path = tmp_path / "disk"
    filled(
        path,
        *(
            record(f"{tenant}{generation}", tenant=tenant, generation=generation)
            for tenant in (1, 2)
            for generation in range(4)
        ),
        invalidations=[
            Invalidation(1, (Scope(tenant=1),), 0.0),
            Invalidation(2, (Scope(tenant=2),), 0.0),
            Invalidation(3, (Scope(tenant=1),), 0.0),
        ],
    )
    assert names(path) == {key_of(name) for name in ("13", "22", "23")}


def test_a_named_parent_that_is_gone_takes_its_children(tmp_path: Path) -> None:
    """An invalidation by keys takes the children of a chunk whose own record is gone already."""
    path = tmp_path / "disk"
    filled(
        path,
        record("child", "gone"),
        record("other", "elsewhere"),
        invalidations=[Invalidation(1, (Scope(keys=frozenset([key_of("gone")])),), 0.0)],
    )
    assert names(path) == {key_of("other")}


def test_the_log_begins_anew_once_it_was_applied(tmp_path: Path) -> None:
    """Opening settles the entries: the log is short again, and the generation goes on, over any number of openings."""
    path = tmp_path / "disk"
    filled(path, record("a"), invalidations=[Invalidation(n, (Scope(tenant=n),), 0.0) for n in range(1, 50)])
    long = (path / "log").stat().st_size
    for _ in range(3):
        held = open_directory(path, SLOT, 8 * SLOT)
        assert held.generation == 49 and held.log.read().entries == []
        held.close()
    assert (path / "log").stat().st_size < long / 10
    assert names(path) == {key_of("a")}


def test_settling_is_durable_before_the_log_forgets(tmp_path: Path) -> None:
    """The table is synced before the log begins anew, and the new log before it takes the old one's place."""
    path, order = tmp_path / "disk", []

    class Ordered(Files):
        def sync(self, fd: int) -> None:
            super().sync(fd)
            order.append(os.readlink(f"/proc/self/fd/{fd}").rsplit("/", 1)[1])

        def replace(self, source: Path, target: Path) -> None:
            super().replace(source, target)
            order.append("replaced")

    filled(path, record("a"), invalidations=[Invalidation(1, (Scope(),), 0.0)])
    assert names(path, files=Ordered()) == set()
    assert order == ["table", "log.new", "replaced"]


@pytest.mark.parametrize("how", ["missing", "empty", "cut", "flipped", "rolled back"])
def test_without_a_log_everything_is_forgotten(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    """A log that is lost, damaged or an older one can't say what was invalidated: nothing is found, now and later."""
    path = tmp_path / "disk"
    filled(path, record("a"), invalidations=[Invalidation(1, (Scope(tenant=1),), 0.0)])
    old = (path / "log").read_bytes()
    assert names(path) == {key_of("a")}
    filled(path, record("a"), record("b", generation=2), invalidations=[Invalidation(2, (Scope(tenant=1),), 0.0)])
    log = path / "log"
    match how:
        case "missing":
            log.unlink()
        case "empty":
            log.write_bytes(b"")
        case "cut":
            log.write_bytes(log.read_bytes()[:-1])
        case "flipped":
            log.write_bytes(log.read_bytes()[:-1] + b"!")
        case "rolled back":
            log.write_bytes(old)
    held = open_directory(path, SLOT, 8 * SLOT)
    assert contents(held.table) == {} and held.generation > 2
    held.close()
    assert names(path) == set()
    assert ["disk_log_lost" in entry.getMessage() for entry in caplog.records] == [True]


def test_a_generation_never_comes_twice(tmp_path: Path) -> None:
    """However often the log is lost, the generation only rises while a record of it is there."""
    path, seen = tmp_path / "disk", []
    for _ in range(4):
        held = open_directory(path, SLOT, 8 * SLOT)
        seen.append(held.generation)
        held.table.put(0, record("a", generation=held.generation))
        held.table.flush()
        held.close()
        (path / "log").unlink()
    assert seen == sorted(set(seen))


def test_a_mount_that_went_away_is_not_made_anew(tmp_path: Path) -> None:
    """With is_new=False an empty or missing directory is refused and nothing is made; one that is there opens."""
    path = tmp_path / "disk"
    for _ in range(2):
        with pytest.raises(DirectoryError, match="gone: mount it again"):
            open_directory(path, SLOT, 8 * SLOT, is_new=False)
        assert not path.exists() or os.listdir(path) == []
        path.mkdir(exist_ok=True)
    filled(path, record("a"))
    assert names(path, is_new=False) == {key_of("a")}


def used_by(path: Path, shape: int | None) -> set[ChunkKey]:
    """What engines of that many replicas (None: one that has only itself) find in `path`; each stores a chunk more."""
    check_directory(path, 8 * SLOT)
    found = set()
    for number in range(shape or 1):
        inner = replica_directory(path, None if shape is None else number)
        held = open_directory(inner, SLOT, 8 * SLOT)
        slots = held.table.slots()
        found |= {held.table.key(slot) for slot in slots}
        held.table.put(len(slots), record(f"{shape}/{number}", tenant=1))
        held.table.flush()
        held.close()
        held = open_directory(inner, SLOT, 8 * SLOT)  # the choice is the same now that there is a table
        assert replica_directory(path, None if shape is None else number) == held.path
        held.close()
    return found


@pytest.mark.parametrize(
    "shapes", [(2, 2), (2, 3, None), (None, 2, 3, None), (None, None), (3, 1, 2), (2, None, 2), (1, None, 2)], ids=str
)
def test_each_shape_starts_again_and_is_warm(tmp_path: Path, shapes: tuple[int | None, ...]) -> None:
    """Whatever the number of replicas is next time: the check before the start takes the directory, and each replica
    that there was before finds its chunks."""
    path, stored = tmp_path / "disk", dict[int, set[ChunkKey]]()
    for shape in shapes:
        count = shape or 1
        found = used_by(path, shape)
        for number in range(count):
            assert stored.get(number, set()) <= found, f"replica {number} of {shapes}"
        for number in range(count):
            stored.setdefault(number, set()).add(key_of(f"{shape}/{number}"))
    remove_directory(path)
    assert not path.exists()


def test_a_directory_that_a_replica_uses_is_in_use(tmp_path: Path) -> None:
    """The check before a start sees a server whose replicas hold the directories in it."""
    path = tmp_path / "disk"
    used_by(path, 2)
    held = open_directory(path / "replica-1", SLOT, 8 * SLOT)
    with pytest.raises(DirectoryError, match="in use by process"):
        check_directory(path, 8 * SLOT)
    held.close()
    check_directory(path, 8 * SLOT)


@pytest.mark.parametrize("name", ["replica-x", "replica-", "other", "replica-0"])
def test_what_is_no_replica_is_foreign(tmp_path: Path, name: str) -> None:
    """A file, or a directory of another name, is somebody's: refused, as before."""
    path = tmp_path / "disk"
    path.mkdir()
    (path / name).touch() if name == "replica-0" else (path / name).mkdir()
    with pytest.raises(DirectoryError, match="other files"):
        check_directory(path, 8 * SLOT)


@pytest.mark.parametrize("size", [8 * SLOT, 1 << 60])
def test_a_check_leaves_nothing_behind(tmp_path: Path, size: int) -> None:
    """A directory, and those above it, that a check made are gone after it, also where it fails; others stay."""
    with contextlib.suppress(DirectoryError):
        check_directory(tmp_path / "new" / "hotspan-kv-0", size)
    assert not list(tmp_path.iterdir())
    (tmp_path / "kept").mkdir()
    with contextlib.suppress(DirectoryError):
        check_directory(tmp_path / "kept", size)
    assert [each.name for each in tmp_path.iterdir()] == ["kept"]
