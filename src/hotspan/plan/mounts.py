"""What a directory lies on: its file system, and the device below it. Asks nothing of the file system itself."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs")
_NETWORK = (
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ncpfs", "afs", "ceph", "lustre", "gpfs", "glusterfs", "beegfs", "9p"),
    *("virtiofs", "fuse.sshfs", "fuse.s3fs", "fuse.glusterfs", "fuse.ceph", "fuse.mount-s3", "fuse.gcsfuse"),
    *("fuse.juicefs", "fuse.rclone", "wekafs", "pvfs2", "orangefs"),
)
_DEPTH = 8
"""Devices over devices that are followed down."""


class Medium(Enum):
    """What bytes end up on."""

    NVME = "NVMe"
    SSD = "SSD"
    HDD = "hard disk"
    VIRTIO = "virtual disk"
    MEMORY = "memory"
    NETWORK = "network"
    OVERLAY = "container layer"
    UNKNOWN = "unknown device"


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of /proc/self/mountinfo (proc(5)). device: "major:minor"; source: what was mounted; root: of it."""

    device: str
    root: str
    point: str
    kind: str
    source: str
    options: tuple[str, ...]


def read_mounts(path: Path = Path("/proc/self/mountinfo")) -> list[Mount]:
    """All mounts, as old as they are. Raises: OSError."""
    return [mount for line in path.read_text().splitlines() if (mount := _parse(line)) is not None]


def mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    """The mount that an absolute path lies on: the longest, and of several at one point the last."""
    found = None
    for mount in mounts:
        point = Path(mount.point)
        if path.is_relative_to(point) and (found is None or len(point.parts) >= len(Path(found.point).parts)):
            found = mount
    return found


def medium_of(mount: Mount, mounts: list[Mount], root: Path = Path("/")) -> Medium:
    """What the bytes of a mount end up on, as far as /sys tells. root: of /sys."""
    return _medium(mount, mounts, root, _DEPTH)


def _medium(mount: Mount, mounts: list[Mount], root: Path, depth: int) -> Medium:
    if mount.kind in _MEMORY:
        return Medium.MEMORY
    if mount.kind in _NETWORK:
        return Medium.NETWORK
    if mount.kind == "overlay":
        upper = next((option.partition("=")[2] for option in mount.options if option.startswith("upperdir=")), "")
        below = mount_of(Path(upper), mounts) if upper.startswith("/") and Path(upper).exists() else None
        if below is None or below.kind == "overlay" or depth == 0:
            return Medium.OVERLAY
        return _medium(below, mounts, root, depth - 1)
    return _device_medium(_block_device(mount, root), mounts, root, depth)


def _block_device(mount: Mount, root: Path) -> Path | None:
    """The /sys directory of a mount's disk; of the whole disk where a partition is mounted."""
    numbers = [mount.device]
    if mount.device.startswith("0:") and mount.source.startswith("/dev/"):  # btrfs has a number of its own
        try:
            device = os.stat(mount.source).st_rdev
            numbers.append(f"{os.major(device)}:{os.minor(device)}")
        except OSError:
            pass
    for number in numbers:
        directory = root / "sys/dev/block" / number
        if directory.exists():
            found = directory.resolve()
            return found.parent if (found / "partition").exists() else found
    return None


def _device_medium(device: Path | None, mounts: list[Mount], root: Path, depth: int) -> Medium:
    if device is None or depth == 0:
        return Medium.UNKNOWN
    name = device.name
    if re.match(r"zram|ram\d", name):
        return Medium.MEMORY
    if name.startswith("nvme"):
        return Medium.NVME
    if name.startswith(("vd", "xvd")):
        return Medium.VIRTIO  # says of itself that it rotates, whatever it is
    if name.startswith(("nbd", "rbd")):
        return Medium.NETWORK
    backing = _line(device / "loop/backing_file")
    if backing and (below := mount_of(Path(backing), mounts)) is not None:
        return _medium(below, mounts, root, depth - 1)
    media = {_device_medium(below, mounts, root, depth - 1) for below in _below(device)}
    for slowest in (Medium.MEMORY, Medium.NETWORK, Medium.HDD, Medium.VIRTIO, Medium.SSD, Medium.NVME):
        if slowest in media:
            return slowest
    return {"0": Medium.SSD, "1": Medium.HDD}.get(_line(device / "queue/rotational"), Medium.UNKNOWN)


def _below(device: Path) -> Iterator[Path]:
    """The devices that a mapped or a RAID device is made of, whole disks."""
    slaves = device / "slaves"
    for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        found = slave.resolve()
        yield found.parent if (found / "partition").exists() else found


def _line(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parse(line: str) -> Mount | None:
    """The fields of a line; the optional ones end with a dash."""
    left, dash, right = line.partition(" - ")
    fields, rest = left.split(" "), right.split(" ")
    if not dash or len(fields) < 6 or len(rest) < 3:
        return None
    options = (*fields[5].split(","), *rest[2].split(","))
    return Mount(fields[2], _plain(fields[3]), _plain(fields[4]), rest[0], _plain(rest[1]), options)


def _plain(text: str) -> str:
    r"""A path without its escapes: a blank is \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
