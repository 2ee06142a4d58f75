"""What memory is left, read from trees like those of containers, and from this machine."""

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.types import GIB
from hotspan.plan.memory import Available, available_memory, copy_gb_s, memory_of_files, shared_memory

UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A root directory with /proc and /sys/fs/cgroup as a kernel would show them."""

    def __init__(self, root: Path, available: int = 200 * GIB) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 999 kB\nMemAvailable: {available // 1024} kB\nShmem: 5 kB\n")

    def write(self, path: str, text: object) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v2(self, own: str, mounted: str = "/") -> None:
        """A unified hierarchy of which `mounted` is shown at /sys/fs/cgroup."""
        self.write("proc/self/mountinfo", f"30 23 0:26 {mounted} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup rw")
        self.write("proc/self/cgroup", f"0::{own}")

    def v1(self, own: str, mounted: str = "/") -> None:
        """A hierarchy for memory of its own, beside others."""
        self.write(
            "proc/self/mountinfo",
            "31 30 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
            f"32 30 0:31 {mounted} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory",
        )
        self.write("proc/self/cgroup", f"5:cpu:/elsewhere\n4:memory:{own}\n0::/")

    def group_v2(self, path: str, limit: object, usage: int, inactive: int = 0, high: object = "max") -> None:
        at = f"sys/fs/cgroup/{path.strip('/')}"
        for name, value in (("memory.max", limit), ("memory.high", high), ("memory.current", usage)):
            self.write(f"{at}/{name}", value)
        self.write(f"{at}/memory.stat", f"anon 1\ninactive_file {inactive}")

    def group_v1(self, path: str, limit: int, usage: int, inactive: int = 0, above: int = UNLIMITED_V1) -> None:
        at = f"sys/fs/cgroup/memory/{path.strip('/')}"
        self.write(f"{at}/memory.limit_in_bytes", limit)
        self.write(f"{at}/memory.usage_in_bytes", usage)
        self.write(f"{at}/memory.stat", f"total_inactive_file {inactive}\nhierarchical_memory_limit {above}")

    @property
    def left(self) -> Available:
        return available_memory(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_the_kernels_word_counts(machine: Machine) -> None:
    """A machine without any cgroup has what MemAvailable says."""
    assert machine.left == Available(200 * GIB, "MemAvailable of /proc/meminfo")


def test_a_container_has_its_limit_and_not_the_hosts_memory(machine: Machine) -> None:
    """A pod of 16 GiB on a host with 200 free has 16, less what it uses, and its inactive page cache comes back."""
    machine.v2("/")
    machine.group_v2("/", 16 * GIB, 6 * GIB, inactive=2 * GIB)
    assert machine.left == Available(12 * GIB, "the limit of cgroup /sys/fs/cgroup")


def test_the_tightest_ancestor_counts(machine: Machine) -> None:
    """What is left is the least over the own cgroup and all above it, each with its own usage."""
    machine.v2("/a/b/c")
    machine.group_v2("/a/b/c", "max", 1 * GIB)
    machine.group_v2("/a/b", 20 * GIB, 5 * GIB)
    machine.group_v2("/a", 30 * GIB, 22 * GIB)
    machine.group_v2("/", "max", 22 * GIB)
    assert machine.left.bytes == 8 * GIB


def test_what_throttles_is_a_limit(machine: Machine) -> None:
    """Above memory.high a process is held up: that is as far as a tier may go."""
    machine.v2("/a")
    machine.group_v2("/a", 20 * GIB, 4 * GIB, high=10 * GIB)
    assert machine.left.bytes == 6 * GIB


def test_a_cgroup_over_its_limit_has_nothing_left(machine: Machine) -> None:
    """Usage above the limit (it was lowered) is nothing left, and not a negative size."""
    machine.v2("/a")
    machine.group_v2("/a", 4 * GIB, 5 * GIB)
    assert machine.left.bytes == 0


def test_the_old_hierarchy_counts_as_well(machine: Machine) -> None:
    """cgroup v1: the memory controller's limit, and limits above what can be seen from here."""
    machine.v1("/pod/app")
    machine.group_v1("/pod/app", 12 * GIB, 3 * GIB, inactive=1 * GIB)
    machine.group_v1("/pod", UNLIMITED_V1, 3 * GIB)
    machine.group_v1("/", UNLIMITED_V1, 90 * GIB)
    assert machine.left.bytes == 10 * GIB
    machine.group_v1("/pod/app", UNLIMITED_V1, 3 * GIB, above=8 * GIB)
    assert machine.left.bytes == 5 * GIB


def test_no_limit_is_no_limit(machine: Machine) -> None:
    """ "max", and v1's number for it, leave what the kernel calls available."""
    machine.v1("/")
    machine.group_v1("/", UNLIMITED_V1, GIB)
    assert machine.left.bytes == 200 * GIB
    machine.v2("/")
    machine.group_v2("/", "max", GIB)
    assert machine.left.bytes == 200 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_container_that_sees_its_hosts_paths_finds_itself(version: str, machine: Machine) -> None:
    """Without a cgroup namespace the path is the host's, and the own cgroup is what is mounted."""
    getattr(machine, version)("/docker/abc", "/docker/abc")
    getattr(machine, f"group_{version}")("/", 7 * GIB, 2 * GIB)
    assert machine.left.bytes == 5 * GIB


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_below_its_hosts_path_too(version: str, machine: Machine) -> None:
    """A cgroup within the container's own is found below what is mounted."""
    getattr(machine, version)("/docker/abc/child", "/docker/abc")
    getattr(machine, f"group_{version}")("/child", 4 * GIB, 1 * GIB)
    getattr(machine, f"group_{version}")("/", 7 * GIB, 2 * GIB)
    assert machine.left.bytes == 3 * GIB


def test_a_path_outside_of_what_is_mounted_is_the_mount_itself(machine: Machine) -> None:
    """A path that leads out of the namespace (/../x), or is not there, stands for the nearest that is."""
    machine.group_v2("/../neighbour", 3 * GIB, 2 * GIB)
    for own in ("/../neighbour", "/gone/deep"):
        machine.v2(own)
        machine.group_v2("/", 7 * GIB, 2 * GIB)
        assert machine.left.bytes == 5 * GIB


@pytest.mark.parametrize("text", ["", "what", "-1 -1", "memory.max"])
def test_files_that_say_nothing_limit_nothing(text: str, machine: Machine) -> None:
    """Unreadable files of a cgroup are as if it were not there."""
    machine.v2("/")
    for name in ("memory.max", "memory.current", "memory.stat"):
        machine.write(f"sys/fs/cgroup/{name}", text)
    assert machine.left.bytes == 200 * GIB
    machine.write("proc/self/mountinfo", text)
    machine.write("proc/self/cgroup", text)
    assert machine.left.bytes == 200 * GIB


def test_a_kernel_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    """No figure is made up where /proc/meminfo has none."""
    with pytest.raises(OSError):
        available_memory(tmp_path)
    Machine(tmp_path).write("proc/meminfo", "MemTotal: 1 kB")
    with pytest.raises(ValueError, match="MemAvailable"):
        available_memory(tmp_path)
    assert memory_of_files(tmp_path) == 0


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 99), st.integers(0, 99))
def test_never_more_than_any_limit(available: int, limit: int, usage: int, inactive: int) -> None:
    """What is left is within MemAvailable and within the limit, and not negative."""
    import tempfile

    with tempfile.TemporaryDirectory() as root:
        machine = Machine(Path(root), available * GIB)
        machine.v2("/a")
        machine.group_v2("/a", limit * GIB, usage * GIB, inactive * GIB)
        assert 0 <= machine.left.bytes <= min(available, limit) * GIB


def test_this_machine_has_some() -> None:
    """On the machine that runs this, there is memory left, no more than it has; and /dev/shm has a size."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < available_memory().bytes <= total
    shared = shared_memory(Path("/dev/shm"))
    assert 0 <= shared.free_bytes <= shared.total_bytes > 0
    with pytest.raises(OSError):
        shared_memory(Path("/no/such/directory"))


def test_a_file_in_memory_counts() -> None:
    """64 MiB in /dev/shm are among what files in memory take, whatever others write and remove there meanwhile."""
    size = 64 << 20
    fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.write(fd, bytes(size))
        assert memory_of_files() > 0.9 * size  # the kernel's count is exact to some pages of each core
    finally:
        os.close(fd)


def test_copies_have_a_rate() -> None:
    """Of this machine: nothing that no memory reaches."""
    assert 0.01 < copy_gb_s() < 10_000
