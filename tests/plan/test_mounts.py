"""What a directory lies on, from mount tables and /sys trees like those of machines that are rented."""

from pathlib import Path

import pytest

from hotspan.plan.mounts import Medium, Mount, medium_of, mount_of, read_mounts

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw,size=24684096k
27 1 259:1 / / rw,relatime shared:1 master:2 - ext4 /dev/nvme0n1p1 rw
28 27 259:5 / /mnt/my\040drive rw - xfs /dev/nvme1n1 rw
29 27 0:50 / /mnt/nfs rw - nfs4 server:/export rw,vers=4.2
30 27 0:51 / /mnt/s3 rw - fuse.mount-s3 mountpoint-s3 rw
31 28 0:52 / /mnt/my\040drive/deep rw - tmpfs tmpfs rw
32 27 8:1 / /mnt/hdd rw - ext4 /dev/sda1 rw
33 27 0:53 / /mnt/over rw - tmpfs tmpfs rw
34 33 259:5 / /mnt/over rw - xfs /dev/nvme1n1 rw
not a line
"""


@pytest.fixture
def mounts(tmp_path: Path) -> list[Mount]:
    path = tmp_path / "mountinfo"
    path.write_text(TABLE)
    return read_mounts(path)


def disk(root: Path, number: str, name: str, *, rotational: int = 0, partition_of: str = "", slaves: str = "") -> None:
    """A block device in a tree like /sys."""
    device = root / "sys/devices" / partition_of / name
    (device / "queue").mkdir(parents=True)
    if partition_of:
        (device / "partition").write_text("1\n")
    else:
        (device / "queue/rotational").write_text(f"{rotational}\n")
    for slave in slaves.split():
        (device / "slaves").mkdir(exist_ok=True)
        (device / "slaves" / slave.split("/")[-1]).symlink_to(root / "sys/devices" / slave)
    link = root / "sys/dev/block" / number
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(device)


def on(number: str, kind: str = "ext4", source: str = "/dev/x", options: tuple[str, ...] = ()) -> Mount:
    return Mount(number, "/", "/m", kind, source, options)


@pytest.mark.parametrize(
    ("path", "kind", "point"),
    [
        ("/var/lib/x", "ext4", "/"),
        ("/dev/shm/x", "tmpfs", "/dev/shm"),
        ("/dev/shmx", "ext4", "/"),
        ("/mnt/my drive/kv", "xfs", "/mnt/my drive"),
        ("/mnt/my drive/deep/kv", "tmpfs", "/mnt/my drive/deep"),
        ("/mnt/over/kv", "xfs", "/mnt/over"),
    ],
)
def test_the_deepest_and_last_mount_is_the_one(path: str, kind: str, point: str, mounts: list[Mount]) -> None:
    """A path lies on the longest mount point above it; of several there, on the one that was mounted last."""
    found = mount_of(Path(path), mounts)
    assert found is not None and (found.kind, found.point) == (kind, point)


@pytest.mark.parametrize(
    ("path", "medium"),
    [
        ("/dev/shm", Medium.MEMORY),
        ("/mnt/nfs", Medium.NETWORK),
        ("/mnt/s3", Medium.NETWORK),
        ("/mnt/my drive", Medium.NVME),
        ("/", Medium.NVME),
        ("/mnt/hdd", Medium.HDD),
    ],
)
def test_media_of_common_mounts(path: str, medium: Medium, mounts: list[Mount], tmp_path: Path) -> None:
    """Memory and network are known by the file system, disks by /sys, partitions by the disk they are on."""
    disk(tmp_path, "259:1", "nvme0n1p1", partition_of="nvme0n1")
    disk(tmp_path, "259:5", "nvme1n1")
    (tmp_path / "sys/devices/sda/queue").mkdir(parents=True)
    (tmp_path / "sys/devices/sda/queue/rotational").write_text("1\n")
    disk(tmp_path, "8:1", "sda1", partition_of="sda")
    mount = mount_of(Path(path), mounts)
    assert mount is not None
    assert medium_of(mount, mounts, tmp_path) is medium


@pytest.mark.parametrize(
    ("name", "rotational", "medium"),
    [
        ("sdb", 0, Medium.SSD),
        ("sdb", 1, Medium.HDD),
        ("vda", 1, Medium.VIRTIO),  # virtio disks say that they rotate
        ("xvda", 1, Medium.VIRTIO),
        ("zram0", 0, Medium.MEMORY),
        ("ram0", 0, Medium.MEMORY),
        ("nbd0", 0, Medium.NETWORK),
    ],
)
def test_devices_by_name(name: str, rotational: int, medium: Medium, tmp_path: Path) -> None:
    """A file system on a RAM disk is memory, whatever it is called."""
    disk(tmp_path, "9:9", name, rotational=rotational)
    assert medium_of(on("9:9"), [], tmp_path) is medium


def test_mapped_and_raid_devices_are_what_their_slowest_part_is(tmp_path: Path) -> None:
    """LVM over NVMe is NVMe; a RAID with one hard disk is a hard disk."""
    disk(tmp_path, "259:0", "nvme0n1")
    disk(tmp_path, "8:0", "sda", rotational=1)
    disk(tmp_path, "253:0", "dm-0", slaves="nvme0n1")
    disk(tmp_path, "9:0", "md0", slaves="nvme0n1 sda")
    disk(tmp_path, "253:1", "dm-1", slaves="dm-0")
    assert medium_of(on("253:0"), [], tmp_path) is Medium.NVME
    assert medium_of(on("253:1"), [], tmp_path) is Medium.NVME
    assert medium_of(on("9:0"), [], tmp_path) is Medium.HDD


def test_a_loop_device_is_what_its_file_lies_on(tmp_path: Path, mounts: list[Mount]) -> None:
    """An image in /dev/shm is memory, although it looks like a disk."""
    disk(tmp_path, "7:0", "loop0")
    (tmp_path / "sys/devices/loop0/loop").mkdir()
    (tmp_path / "sys/devices/loop0/loop/backing_file").write_text("/dev/shm/image\n")
    assert medium_of(on("7:0"), mounts, tmp_path) is Medium.MEMORY


def test_an_overlay_is_what_its_upper_layer_lies_on(tmp_path: Path) -> None:
    """In a container that can't be seen: then it is a container's layer, and measuring tells whether it is memory."""
    shared = [Mount("0:5", "/", "/dev/shm", "tmpfs", "tmpfs", ())]
    assert medium_of(on("0:60", "overlay", options=("rw", "upperdir=/dev/shm")), shared, tmp_path) is Medium.MEMORY
    hidden = on("0:60", "overlay", options=("upperdir=/var/lib/docker/no-such-layer/diff",))
    assert medium_of(hidden, shared, tmp_path) is Medium.OVERLAY


def test_mounts_that_lie_on_each_other_are_unknown(tmp_path: Path) -> None:
    """A loop device on a file of an overlay whose upper layer is that device: the search ends, wherever it begins."""
    disk(tmp_path, "7:0", "loop0")
    (tmp_path / "sys/devices/loop0/loop").mkdir()
    (tmp_path / "sys/devices/loop0/loop/backing_file").write_text(f"{tmp_path}/over/file\n")
    (tmp_path / "upper").mkdir()
    around = [
        Mount("7:0", "/", str(tmp_path / "upper"), "ext4", "/dev/loop0", ()),
        Mount("0:60", "/", str(tmp_path / "over"), "overlay", "overlay", ("rw", f"upperdir={tmp_path}/upper")),
    ]
    assert {medium_of(mount, around, tmp_path) for mount in around} <= {Medium.UNKNOWN, Medium.OVERLAY}


def test_what_is_not_known_is_said_to_be_unknown(tmp_path: Path) -> None:
    """A device that /sys does not show, or says nothing of, is unknown."""
    assert medium_of(on("0:77", "zfs", "pool/data"), [], tmp_path) is Medium.UNKNOWN
    (tmp_path / "sys/dev/block/8:7").mkdir(parents=True)
    assert medium_of(on("8:7"), [], tmp_path) is Medium.UNKNOWN


def test_this_machine_has_a_root() -> None:
    """The real mount table has what / lies on, and /dev/shm is memory."""
    mounts = read_mounts()
    shared = mount_of(Path("/dev/shm"), mounts)
    assert shared is not None and medium_of(shared, mounts) is Medium.MEMORY
    root = mount_of(Path("/"), mounts)
    assert root is not None and root.point == "/"
