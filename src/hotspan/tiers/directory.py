"""A directory of the disk engine (tiers/owned.py), and what it was made for.

    DIR/lock    held by the one process that owns the directory
    DIR/table   one record per slot (tiers/table.py); the node's daemon calls it "objects"
    DIR/slab    equal slots; allocated in steps (tiers/room.py), or whole
    DIR/log     of a tier: what was invalidated (tiers/log.py)
    DIR/names   of a tier: under which names it was written (tiers/written_under.py)

Everything is 0600 in a 0700 directory.
"""

import contextlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.core.types import GIB
from hotspan.tiers.files import Files
from hotspan.tiers.log import GenerationLog
from hotspan.tiers.owned import (
    check_space,
    explained,
    lock_directory,
    make_directory,
    open_file,
    open_slab,
    reserve_slab,
)
from hotspan.tiers.room import NO_SPACE, SlabSpace
from hotspan.tiers.table import DiskTable, Geometry, is_table, read_geometry

logger = logging.getLogger(__name__)

MAX_SPLIT = 64
"""Slots of a chunk in a directory that was made for smaller chunks: more would be too many I/Os for each."""

_REPLICA = "replica-"
"""What the names of data-parallel replicas' directories begin with."""

POSITION_FILE = "l2-log"
"""How far a replica has applied the log of an L2 (l2/position.py)."""


@dataclass(frozen=True, slots=True)
class DirectoryLayout:
    """Which files a directory has, and whose they are.

    table:   name of the table, by which the directory is known.
    has_log: whether the table is held against a log of what was invalidated.
    """

    whose: str
    table: str
    others: tuple[str, ...]
    has_log: bool

    @property
    def files(self) -> tuple[str, ...]:
        """All names that may be there."""
        return ("lock", "slab", "lost+found", self.table, f"{self.table}.new", *self.others)


NAMES_FILE = "names"
"""Under which names the directory was written (written_under.py)."""

_WHOLE = (POSITION_FILE, NAMES_FILE)
TIER = DirectoryLayout("the disk tier", "table", ("log", "log.new", *_WHOLE, *(f"{name}.new" for name in _WHOLE)), True)


@dataclass(frozen=True, slots=True)
class OpenDirectory:
    """A directory that this process owns until `close`.

    table:      what a former owner left, less what was invalidated.
    free, bare: slots that hold nothing, with and without space on the disk; the lowest last.
    """

    path: Path
    files: Files
    geometry: Geometry
    table: DiskTable
    log: GenerationLog | None
    generation: int
    slab_fd: int
    direct: bool
    space: SlabSpace
    free: list[int]
    bare: list[int]
    _fds: tuple[int, ...]

    def close(self) -> None:
        """Give the directory back."""
        if self.log is not None:
            self.log.close()
        for fd in self._fds:
            self.files.close(fd)


def open_directory(
    path: Path,
    slot_bytes: int,
    disk_bytes: int,
    *,
    frame_bytes: int | None = None,
    layout: DirectoryLayout = TIER,
    allow_direct: bool = True,
    is_new: bool = True,
    files: Files | None = None,
    step_bytes: int | None = None,
    reserve_bytes: int = 0,
) -> OpenDirectory:
    """Own `path` as a slab of slots of `slot_bytes`, `disk_bytes` in all; what it holds stays.

    A directory made for other slots is taken as it is, unless a chunk would need too many of them; a changed
    `disk_bytes` grows or shrinks it.
    frame_bytes: of the largest chunk; what fills a slot by default.
    is_new:     whether it may have to be made; if not, an empty one is a mount that went away.
    step_bytes: how much space is allocated for what comes; None allocates all of it.
    Blocks:  for the allocation of the files and one read of the table; not for writing the slab.
    Raises:  DirectoryError with what to do: in use, full, read-only, not a directory, made for much smaller chunks.
    """
    files = files or Files()
    fds: list[int] = []
    log: GenerationLog | None = None
    try:
        whose = layout.whose
        if not is_new and not (path / layout.table).exists():
            raise DirectoryError(f"{whose}'s directory {path} is gone: mount it again")
        own = (*layout.files, *(each.name for each in replicas(path))) if layout.has_log else layout.files
        make_directory(path, own, whose, known_by=layout.table)
        fds.append(lock_directory(files, path, whose))
        table_fd = open_file(files, path / layout.table)
        fds.append(table_fd)
        found = read_geometry(files, table_fd)
        geometry = _geometry(path, found, slot_bytes, frame_bytes or slot_bytes, disk_bytes, whose)
        if step_bytes is None:
            reserve_slab(files, path, geometry.slab_bytes, whose, besides=geometry.table_bytes)
        elif step_bytes:
            _check_new(path, geometry.slab_bytes + geometry.table_bytes, reserve_bytes)
        table = DiskTable(files, table_fd, geometry, path / layout.table)
        table.format()
        table.read()
        generation = 0
        if layout.has_log:
            log = GenerationLog(files, path / "log")
            generation = _settle(path, table, log, moves=not is_new)
        slab_fd, direct = open_slab(files, path, allow_direct=allow_direct)
        fds.append(slab_fd)
        space = SlabSpace(files, slab_fd, geometry.slot_bytes, reserve_bytes)
        least = -(-(frame_bytes or slot_bytes) // geometry.slot_bytes)
        free, bare = _first_step(files, slab_fd, table, space, step_bytes, least)
        return OpenDirectory(
            path, files, geometry, table, log, generation, slab_fd, direct, space, free, bare, tuple(fds)
        )
    except BaseException as error:
        if log is not None:
            log.close()
        for fd in fds:
            files.close(fd)
        if isinstance(error, OSError):
            raise explained(path, error, layout.whose) from error
        raise


def _settle(path: Path, table: DiskTable, log: GenerationLog, *, moves: bool) -> int:
    """Take out of the table what the log says was invalidated, and begin the log anew; returns the generation.

    moves: also a log without entries, to another place of the disk: it may be its place that made the tier fail.
    """
    said = log.read()
    newest = table.newest_generation()
    if not said.is_whole or newest > said.generation:
        if table.slots():
            logger.warning("disk_log_lost path=%s: what was invalidated is not known, all chunks are forgotten", path)
            table.clear()
        generation = max(newest, said.generation) + 1
    else:
        generation = said.generation
        if not said.entries and not moves:
            return generation
        slots = table.deleted(said.entries)
        table.free(slots)
        table.write_all(slots)
        table.sync()
    log.begin(generation)
    return generation


def _first_step(
    files: Files, slab_fd: int, table: DiskTable, space: SlabSpace, step_bytes: int | None, least: int
) -> tuple[list[int], list[int]]:
    """The slots that hold nothing, with and without space: what a former owner allocated beyond a step is given back.

    least: slots of a chunk, which a step has at least.
    Raises: OSError if there is no space for anything.
    """
    if step_bytes is not None:
        _drop_lost(table, files.stat(slab_fd).st_size // space.slot_bytes)
    live = table.slots()
    empty = table.empty()[::-1]
    if step_bytes is None:
        return empty, []
    count = min(len(empty), max(least, step_bytes // space.slot_bytes) if step_bytes else 0)
    count = space.fitting(count) if count else 0
    free = empty[len(empty) - count :]
    end = (max([*live, *free], default=-1) + 1) * space.slot_bytes
    if files.stat(slab_fd).st_size > end:
        files.truncate(slab_fd, end)
    try:
        space.allocate(free)
    except OSError as error:
        if error.errno not in NO_SPACE or not live:
            raise
        free = []  # what there is can be served all the same
    return free, empty[: len(empty) - len(free)]


def _drop_lost(table: DiskTable, slots: int) -> None:
    """Forget chunks behind the end of the slab: somebody cut it, or its last growth did not outlive a power loss."""
    lost = [slot for slot in table.slots() if slot >= slots]
    table.free(lost)
    table.write_all(lost)


def _check_new(path: Path, need: int, reserve_bytes: int) -> None:
    """Raise DirectoryError if a slab that is about to be made could not become as large as it was asked for.

    One that is there already is opened all the same, and becomes as large as it can.
    """
    if not _has_space(path):
        check_space(path, need, TIER.whose, reserve_bytes)


def _has_space(path: Path) -> bool:
    slab = path / "slab"
    return slab.exists() and os.stat(slab).st_blocks > 0


def replica_directory(path: Path, number: int | None) -> Path:
    """The directory of one of several replicas whose disk tier is in `path`; number: None for an engine on its own.

    The first of several and the only one go on with what the other left, so that a server is warm after its number of
    replicas changed. What a replica left that is there no more waits for it, or for `hotspan cache remove`.
    """
    inner = path / f"{_REPLICA}{number or 0}"
    if number:
        return inner
    has_own, has_inner = ((each / TIER.table).exists() for each in (path, inner))
    if has_own != has_inner:
        return path if has_own else inner
    return path if number is None else inner


def replicas(path: Path) -> list[Path]:
    """The directories of replicas in a disk tier's directory."""
    if not path.is_dir():
        return []
    found = (each for each in path.iterdir() if each.name.startswith(_REPLICA) and not each.is_symlink())
    return sorted(each for each in found if each.name.removeprefix(_REPLICA).isdecimal() and each.is_dir())


def check_directory(path: Path, disk_bytes: int, reserve_bytes: int = 0) -> None:
    """Raise DirectoryError if `path` could not be opened with `disk_bytes`, as far as can be told without a model.

    Several replicas may be about to use it, or have used it. Directories that are made for the check are removed again:
    the model may turn out to need none, or not to load.
    """
    files, locks = Files(), list[int]()
    made = [each for each in (path, *path.parents) if not each.exists()]
    try:
        inner = replicas(path)
        make_directory(path, (*TIER.files, *(each.name for each in inner)), TIER.whose, known_by=TIER.table)
        if not made:  # nobody uses what is not there
            locks.extend(lock_directory(files, each, TIER.whose) for each in (path, *inner))
        if not any(map(_has_space, inner)):
            _check_new(path, disk_bytes, reserve_bytes)
    except OSError as error:
        raise explained(path, error, TIER.whose) from error
    finally:
        for lock in locks:
            files.close(lock)
        with contextlib.suppress(OSError):  # somebody else uses it by now
            for each in made:
                each.rmdir()


def remove_directory(path: Path) -> int:
    """Remove a disk tier's directory that no server uses, and those of its replicas or models in it; the bytes freed.

    A directory is a tier's if its table is one. Links in it are not followed.
    Raises: DirectoryError, before anything is removed, if one of them is in use or holds files of others.
    """
    files = Files()
    locks: list[int] = []
    try:
        path = path.resolve()
        inner = (each for each in sorted(path.glob("*/")) if not each.is_symlink())
        tiers = [each for each in (path, *inner) if _has_table(files, each)]
        if not tiers:
            raise DirectoryError(f"{path} is no disk tier's directory: nothing was removed")
        for tier in tiers:
            foreign = sorted({each.name for each in tier.iterdir() if each not in tiers}.difference(TIER.files))
            if foreign:
                raise DirectoryError(
                    f"{tier} holds other files ({', '.join(foreign[:3])}): move them, then remove it again"
                )
            locks.append(lock_directory(files, tier, TIER.whose))
        freed = 0
        for tier in reversed(tiers):
            for own in (tier / name for name in TIER.files if (tier / name).is_file()):
                freed += own.stat().st_blocks * 512
                own.unlink()
            if tier != path:
                tier.rmdir()
        if {each.name for each in path.iterdir()} == {"lock"}:  # of the check before replicas start
            locks.append(lock_directory(files, path, TIER.whose))
            (path / "lock").unlink()
        if not any(path.iterdir()):
            path.rmdir()
        return freed
    except OSError as error:
        raise explained(path, error, TIER.whose) from error
    finally:
        for lock in locks:
            files.close(lock)


def _has_table(files: Files, path: Path) -> bool:
    """Whether there is a disk tier's table in a directory."""
    try:
        fd = os.open(path / "table", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return stat.S_ISREG(os.fstat(fd).st_mode) and is_table(files, fd)
    finally:
        os.close(fd)


def _geometry(
    path: Path, found: Geometry | None, slot_bytes: int, frame_bytes: int, disk_bytes: int, whose: str
) -> Geometry:
    if found is not None and found.slot_bytes > 0:
        slot_bytes = found.slot_bytes
        if frame_bytes > MAX_SPLIT * slot_bytes:
            raise DirectoryError(
                f"{whose}'s directory {path} was made for slots of {slot_bytes} bytes and this model's "
                f"chunks need {frame_bytes}: give --disk another directory, or delete this one to lose what it holds"
            )
    slots = disk_bytes // slot_bytes
    if slots * slot_bytes < frame_bytes:
        raise DirectoryError(
            f"--disk-gib {disk_bytes / GIB:g} holds not one chunk of this model ({frame_bytes / GIB:.3f} GiB): raise it"
        )
    return Geometry(slot_bytes, slots)
