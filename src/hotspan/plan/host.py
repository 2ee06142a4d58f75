"""The machine as a plan sees it: what memory, disks and daemon there are, each probed once."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from hotspan.core.private import is_private_directory
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.plan.daemon import Answerer, Daemon, find_daemon
from hotspan.plan.disk import DiskProbe, probe_disk
from hotspan.plan.memory import Available, SharedMemory, available_memory, shared_memory

_DRIVES: Final = ("/opt/dlami/nvme", "/mnt/nvme", "/local_nvme", "/mnt/local-ssd", "/mnt/disks/ssd0")
"""Where machine images mount the drives of an instance."""


@dataclass(frozen=True, slots=True)
class Host:
    """What this process may use.

    memory: None if it could not be found out. shared_memory: None without /dev/shm.
    daemon: None if nobody asked.
    """

    memory: Available | None
    shared_memory: SharedMemory | None
    disks: tuple[DiskProbe, ...] = ()
    daemon: Daemon | None = None

    @classmethod
    def probe(
        cls, environment: Mapping[str, str], directories: Sequence[Path] | None = None, *, is_measured: bool = True
    ) -> Self:
        """The machine as it is now. Never raises for what the machine does.

        environment: NODE_IP is where the node's daemon listens, if not at 127.0.0.1; TMPDIR is a place for a disk tier.
        directories: for a disk tier, none if empty; None looks in the usual places.
        is_measured: whether disks are written to and read.
        Blocks:      about a second a directory.
        """
        memory = shared = None
        with contextlib.suppress(OSError, ValueError):  # the plan says that it is missing
            memory = available_memory()
        with contextlib.suppress(OSError):
            shared = shared_memory(SHARED_MEMORY)
        places = usual_directories(environment) if directories is None else directories
        disks = tuple(probe_disk(place, is_measured=is_measured) for place in places)
        return cls(memory, shared, disks, _daemon(environment))


def usual_directories(environment: Mapping[str, str]) -> tuple[Path, ...]:
    """Where a disk tier is looked for if nobody names a directory: drives of the instance, then TMPDIR and /tmp.

    The name has the user's id, and what somebody else made there is left alone: others can write to /tmp.
    """
    name = f"hotspan-kv-{os.geteuid()}"
    parents = dict.fromkeys(Path(each) for each in (*_DRIVES, environment.get("TMPDIR") or "/tmp", "/tmp"))
    return tuple(parent / name for parent in parents if parent.is_dir() and _is_ours(parent / name))


def _is_ours(path: Path) -> bool:
    """Whether nobody else made it, or can write to it."""
    return not os.path.lexists(path) or is_private_directory(path, forbidden=0o022)


def _daemon(environment: Mapping[str, str]) -> Daemon:
    """Who answers at this machine's own address, else at NODE_IP's: in a pod the daemon has the node's network."""
    found = find_daemon()
    node = environment.get("NODE_IP")
    if found.who in (Answerer.NOBODY, Answerer.STRANGER) and node:
        return find_daemon(node)
    return found
