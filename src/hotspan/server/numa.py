"""Which NUMA nodes the RAM tier, the GPUs and the disk are on, and which of them are apart (`hotspan doctor`)."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Self

from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.server.findings import Findings, ok, warning

_SYSTEM = Path("/sys")
_NVIDIA = "0x10de"
_DISPLAYS = ("0x0300", "0x0302")
"""PCI classes of GPUs: with outputs, and without."""

_SPREAD = "numactl --interleave=all hotspan serve ..., or mount -o remount,mpol=interleave /dev/shm"


@dataclass(frozen=True, slots=True)
class Numa:
    """Nodes of memory, and what is on which. What is unknown is left out.

    count:         of nodes.
    policy:        of this process's memory, as the kernel writes it; empty if unknown.
    shared_policy: of /dev/shm's mount (mpol=); empty if it has none.
    cpus:          nodes of the CPUs that this process may use.
    gpus:          by PCI address, of those that this process may use.
    """

    count: int = 1
    policy: str = ""
    shared_policy: str = ""
    cpus: frozenset[int] = frozenset()
    gpus: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def probe(cls, environment: Mapping[str, str], policy: str, shared_policy: str, system: Path = _SYSTEM) -> Self:
        """As the kernel tells it below `system`. Never raises for what it does not tell."""
        nodes = {int(path.name[4:]): path for path in (system / "devices/system/node").glob("node[0-9]*")}
        allowed = os.sched_getaffinity(0)
        cpus = frozenset(node for node, path in nodes.items() if allowed & _numbers(_text(path / "cpulist")))
        return cls(max(1, len(nodes)), policy, shared_policy, cpus, _gpus(environment, system))

    @property
    def ram(self) -> frozenset[int]:
        """The nodes that the RAM tier would lie on; empty if that depends on which CPU makes it, or is unknown."""
        policy = self.shared_policy if self.shared_policy not in ("", "default") else self.policy
        if "interleave" in policy:  # commas in the list of a mount's nodes are cut off
            return frozenset(range(self.count))
        if policy.partition(":")[2]:
            return frozenset(_numbers(policy.partition(":")[2]))
        return self.cpus if policy in ("default", "local") and len(self.cpus) == 1 else frozenset()


def placement(numa: Numa, disk: int | None) -> Findings:
    """Whether the RAM tier is near the GPUs that copy from it, and the disk.

    disk: the node of its drive, None if that is unknown or there is no disk.
    """
    apart = {name: node for name, node in numa.gpus.items() if numa.ram and node not in numa.ram}
    if numa.count == 1:
        yield ok("NUMA", "1 node")
    elif apart:
        remedy = f"{_SPREAD}; or a server for each node: numactl --cpunodebind=N --membind=N with that node's GPUs"
        yield warning("NUMA", f"the RAM tier would lie on {_nodes(numa.ram)}, and {_listed(apart)}", remedy)
    elif not numa.ram and numa.policy in ("", "default", "local"):
        state = f"{numa.count} nodes, and the RAM tier would lie on the one that makes it"
        yield warning("NUMA", state + (f"; {_listed(numa.gpus)}" if numa.gpus else ""), _SPREAD)
    else:
        yield ok("NUMA", f"{numa.count} nodes, the RAM tier on {_nodes(numa.ram) if numa.ram else numa.policy}")
    if numa.count == 1 or disk is None:
        return
    far = {name: node for name, node in numa.gpus.items() if node != disk}
    if far or (numa.ram and disk not in numa.ram):
        ram = f", the RAM tier on {_nodes(numa.ram)}" if numa.ram and disk not in numa.ram else ""
        state = f"on node {disk}{ram}{', and ' + _listed(far) if far else ''}"
        remedy = (
            "what is loaded crosses the link between nodes: put --disk on a drive of that node, or serve on the disk's"
        )
        yield warning("NUMA of the disk", state, remedy)
    else:
        yield ok("NUMA of the disk", f"on node {disk}")


def disk_node(directory: Path, system: Path = _SYSTEM) -> int | None:
    """The node of the drive that a directory, which need not exist yet, is on; None for one that is on no drive."""
    base = next(parent for parent in (directory, *directory.parents) if parent.is_dir())
    device = base.stat().st_dev
    return node_of(system / f"dev/block/{os.major(device)}:{os.minor(device)}")


def node_of(device: Path) -> int | None:
    """The node of a device in /sys, which the nearest one above it that has a node tells."""
    try:
        found = device.resolve(strict=True)
    except OSError:
        return None
    for each in (found, *found.parents):
        if text := _text(each / "numa_node"):
            return int(text) if int(text) >= 0 else None
    return None


def shared_policy(mounts: str) -> str:
    """The `mpol` that /dev/shm was mounted with, of what /proc/mounts has; empty if it has none."""
    found = [line.split() for line in mounts.splitlines()]
    options = [fields[3] for fields in found if fields[1:2] == [str(SHARED_MEMORY)]]
    match = re.search(r"(?:^|,)mpol=([^,]*)", options[-1]) if options else None
    return match[1] if match else ""


def _gpus(environment: Mapping[str, str], system: Path) -> dict[str, int]:
    """NVIDIA's GPUs in the order of their addresses; those of CUDA_VISIBLE_DEVICES where it has numbers alone."""
    found = [
        path
        for path in sorted((system / "bus/pci/devices").glob("*"))
        if _text(path / "vendor") == _NVIDIA and _text(path / "class").startswith(_DISPLAYS)
    ]
    words = [word.strip() for word in environment.get("CUDA_VISIBLE_DEVICES", "all").split(",")]
    words = [word for word in words if word not in ("", "-1")]
    if all(word.isdecimal() for word in words):
        found = [found[int(word)] for word in words if int(word) < len(found)]
    nodes = {path.name: node_of(path) for path in found}
    return {name: node for name, node in nodes.items() if node is not None}


def _listed(gpus: Mapping[str, int]) -> str:
    """GPUs by node, in words."""
    by_node = {node: [name for name, its in gpus.items() if its == node] for node in sorted(set(gpus.values()))}
    return ", ".join(f"{_are(names)} on node {node}" for node, names in by_node.items())


def _are(names: list[str]) -> str:
    return f"GPU {names[0]} is" if len(names) == 1 else f"GPUs {' '.join(names)} are"


def _nodes(nodes: frozenset[int]) -> str:
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, sorted(nodes)))}"


def _numbers(text: str) -> set[int]:
    """Of "0-3,8" the numbers; those that are none are left out."""
    found = set[int]()
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal():
            found.update(range(int(first), int(last or first) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
