"""How much memory this process may still take without swapping or being killed, and what /dev/shm has left.

The least of what the kernel calls available (MemAvailable) and, for the process's cgroup and each of its ancestors,

    limit - usage + inactive file pages     (cgroup v2: memory.max and memory.high; v1: memory.limit_in_bytes)

A container's limit is no part of /proc/meminfo: who looks there only sees the host.
"""

import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hotspan.plan.mounts import Mount, read_mounts

_COPIED_BYTES, _COPIES = 64 << 20, 3

_UNLIMITED = 1 << 62
"""What cgroup v1 says where nothing was said is a little less than 2**63."""


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that are left, and whose limit that is."""

    bytes: int
    why: str


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """/dev/shm, where the RAM tier lives."""

    total_bytes: int
    free_bytes: int


def available_memory(root: Path = Path("/")) -> Available:
    """What may still be taken. Raises: OSError or ValueError if /proc/meminfo can't be read.

    root: of /proc and /sys/fs/cgroup.
    """
    least = Available(_meminfo(root / "proc/meminfo", "MemAvailable"), "MemAvailable of /proc/meminfo")
    for limit in _limits(root):
        least = min(least, limit, key=lambda each: each.bytes)
    return least


def memory_of_files(root: Path = Path("/")) -> int:
    """Bytes of files that live in memory (tmpfs), of the whole machine; 0 if that can't be read."""
    try:
        return _meminfo(root / "proc/meminfo", "Shmem")
    except (OSError, ValueError):
        return 0


def copy_gb_s() -> float:
    """How fast one thread copies in memory, in GB/s: what a CPU engine does with each chunk that RAM has.

    Takes:  128 MiB.
    Blocks: about a tenth of a second.
    """
    source, target = bytearray(b"\1" * _COPIED_BYTES), bytearray(_COPIED_BYTES)
    rates = []
    with memoryview(source) as here, memoryview(target) as there:
        for _ in range(1 + _COPIES):  # in the first one, pages come
            began_s = time.perf_counter()
            there[:] = here
            rates.append(_COPIED_BYTES / max(time.perf_counter() - began_s, 1e-9) / 1e9)
    return statistics.median(rates[1:])


def shared_memory(directory: Path) -> SharedMemory:
    """The size of /dev/shm and what is free of it. Raises: OSError."""
    stat = os.statvfs(directory)
    return SharedMemory(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def _meminfo(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"{path} has no {name}")


def _limits(root: Path) -> Iterator[Available]:
    """What each cgroup above this process leaves it."""
    try:
        mounts = [mount for mount in read_mounts(root / "proc/self/mountinfo") if mount.kind.startswith("cgroup")]
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        is_v2 = number == "0" and not controllers
        if not (is_v2 or "memory" in controllers.split(",")):
            continue
        for mount in mounts:
            if mount.kind == "cgroup2" if is_v2 else mount.kind == "cgroup" and "memory" in mount.options:
                for directory in _ancestors(root, mount, path):
                    left = _left_v2(directory) if is_v2 else _left_v1(directory)
                    if left is not None:
                        yield Available(max(0, left), f"the limit of cgroup /{directory.relative_to(root)}")


def _ancestors(root: Path, mount: Mount, path: str) -> Iterator[Path]:
    """The cgroup at `path`, and what is above it, as far as the mount shows them.

    A container without a cgroup namespace sees its host's path, and its own cgroup mounted: `mount.root` is cut off.
    """
    top = root / mount.point.lstrip("/")
    below = path.removeprefix(mount.root) if mount.root != "/" and path.startswith(mount.root) else path
    here = top / below.lstrip("/")
    if ".." in here.parts or not here.is_dir():
        here = top
    while True:
        yield here
        if here == top:
            return
        here = here.parent


def _left_v2(directory: Path) -> int | None:
    limits = [limit for name in ("memory.max", "memory.high") if (limit := _number(directory / name)) is not None]
    usage = _number(directory / "memory.current")
    if not limits or usage is None:
        return None
    return min(limits) - usage + _stat(directory, "inactive_file", usage)


def _left_v1(directory: Path) -> int | None:
    usage = _number(directory / "memory.usage_in_bytes")
    own = _number(directory / "memory.limit_in_bytes")
    limits = [limit for limit in (own, _stat(directory, "hierarchical_memory_limit", 1 << 63)) if limit]
    if usage is None or not limits or min(limits) >= _UNLIMITED:
        return None
    return min(limits) - usage + _stat(directory, "total_inactive_file", usage)


def _number(path: Path) -> int | None:
    """The number in a file; None if there is none ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _stat(directory: Path, name: str, most: int) -> int:
    """An entry of memory.stat, `most` at most; 0 if it is not there."""
    try:
        lines = (directory / "memory.stat").read_text().splitlines()
        return min(most, next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0))
    except (OSError, ValueError, IndexError):
        return 0
