"""Facts about this machine that matter for access: looked up once, judged in posture.py."""

import errno
import os
import resource
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

import psutil

from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.l2.open import DAEMON_PORT
from hotspan.l2.options import SEGMENT_NAME
from hotspan.server.numa import Numa, shared_policy

SEGMENT = SHARED_MEMORY / SEGMENT_NAME
SOCKET = SHARED_MEMORY / f"{SEGMENT_NAME}.sock"


@dataclass(frozen=True, slots=True)
class FileFact:
    """Ownership and permissions (the lowest nine bits) of a file or directory."""

    is_own: bool
    permissions: int

    @property
    def is_private(self) -> bool:
        """Whether only its owner and root have access."""
        return self.is_own and not self.permissions & 0o077


@dataclass(frozen=True, slots=True)
class Facts:
    """A machine and this process on it.

    environment:   variables by name.
    files:         those that were asked for and are there.
    core_bytes:    of a core dump, at most; -1 without limit. core_pattern: where the kernel puts one.
    has_swap:      memory may be written to a disk.
    daemon_hosts:  addresses at which something listens on the daemon's port.
    open_files:    that a server may have, which raises its limit itself; -1 without limit.
    locked_bytes:  of memory that it may lock; -1 without limit.
    huge_pages:    the kernel's setting for ordinary memory. shared_huge_pages: that of /dev/shm's mount.
    numa:          nodes of memory, and what is on which.
    refusal:       why the server would not start, if that was tried.
    """

    environment: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}), repr=False)
    files: Mapping[Path, FileFact] = field(default_factory=lambda: MappingProxyType({}))
    core_bytes: int = 0
    core_pattern: str = "core"
    has_swap: bool = False
    daemon_hosts: tuple[str, ...] = ()
    open_files: int = -1
    locked_bytes: int = -1
    huge_pages: str = ""
    shared_huge_pages: str = ""
    numa: Numa = field(default_factory=Numa)
    refusal: str | None = None

    @classmethod
    def probe(cls, environment: Mapping[str, str], paths: Sequence[Path] = ()) -> Self:
        """The machine as it is now. What can't be found out counts as harmless. Never raises for it."""
        mounts = _text(Path("/proc/mounts"))
        policy = next(iter(_text(Path("/proc/self/numa_maps")).split()[1:2]), "")
        return cls(
            environment,
            {path: fact for path in (*paths, SEGMENT, SOCKET) if (fact := _file(path)) is not None},
            core_bytes=resource.getrlimit(resource.RLIMIT_CORE)[0],
            core_pattern=_text(Path("/proc/sys/kernel/core_pattern")),
            has_swap=_text(Path("/proc/swaps")).count("\n") > 0,
            daemon_hosts=_hosts(DAEMON_PORT),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
            locked_bytes=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            huge_pages=_chosen(_text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))),
            shared_huge_pages=_mount_option(mounts, "/dev/shm", "huge"),
            numa=Numa.probe(environment, policy, shared_policy(mounts)),
        )


def _mount_option(mounts: str, where: str, name: str) -> str:
    """What a mount was given as `name`, as /proc/mounts has it; "never" if nothing, and empty for no mount."""
    found = [fields[3].split(",") for fields in map(str.split, mounts.splitlines()) if fields[1:2] == [where]]
    given = dict(option.partition("=")[::2] for option in found[-1]) if found else {}
    return given.get(name, "never") if found else ""


def can_do_direct_io(directory: Path) -> bool | None:
    """Whether files of a directory, which need not exist yet, take O_DIRECT; None if that can't be tried."""
    base = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    try:
        os.close(os.open(base, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600))
    except OSError as error:
        return False if error.errno == errno.EINVAL else None
    return True


def _file(path: Path) -> FileFact | None:
    try:
        found = path.lstat()
    except OSError:
        return None
    return FileFact(found.st_uid == os.geteuid(), stat.S_IMODE(found.st_mode) & 0o777)


def _hosts(port: int) -> tuple[str, ...]:
    try:
        found = psutil.net_connections("tcp")
    except (psutil.Error, OSError):
        return ()
    return tuple(
        sorted({each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port})
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """Of "always [madvise] never" the one in brackets."""
    return text.partition("[")[2].partition("]")[0]
