"""The machine as a plan sees it: what memory, disks, daemon and instructions there are, each probed once."""

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Self

from hotspan.core.private import is_private_directory
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.l2.open import DAEMON_PORT
from hotspan.l2.options import SEGMENT_NAME
from hotspan.plan.disk import DiskProbe, probe_disk
from hotspan.plan.memory import Available, SharedMemory, available_memory, shared_memory

_DRIVES: Final = ("/opt/dlami/nvme", "/mnt/nvme", "/local_nvme", "/mnt/local-ssd", "/mnt/disks/ssd0")
"""Where machine images mount the drives of an instance."""

_MAX_ANSWER = 65536

_BFLOAT16: Final = {"avx512_bf16", "amx_bf16", "bf16", "svebf16"}
"""Flags of /proc/cpuinfo, on x86-64 and on aarch64."""

_WITHOUT: Final = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
"""Values of ONEDNN_MAX_CPU_ISA (oneDNN, "CPU Dispatcher Control") that leave bfloat16 instructions out."""

LIMIT: Final = "ONEDNN_MAX_CPU_ISA"


class Answerer(Enum):
    """Who answers."""

    HOTSPAN = "hotspan daemon"
    HYPERPOD = "HyperPod's daemon"
    STRANGER = "something else"
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class Daemon:
    """What was found at an address; `url` is what --l2 takes, None where there is no L2."""

    who: Answerer
    address: str
    url: str | None


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


def find_daemon(
    host: str = "127.0.0.1",
    port: int = DAEMON_PORT,
    timeout_s: float = 0.5,
    segment: Path = SHARED_MEMORY / SEGMENT_NAME,
) -> Daemon:
    """Who answers there. Never raises for what the network does.

    hotspan's daemon says its name at GET /health. HyperPod's has no such path: it is taken for one where a connection
    is accepted and its shared memory, through which all is read, is there. (9200 is Elasticsearch's port, too.)
    Blocks: `timeout_s` for each of both steps.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    url = f"sagemaker-hyperpod://{address}"
    if _is_hotspan(host, port, timeout_s):
        return Daemon(Answerer.HOTSPAN, address, url)
    try:
        socket.create_connection((host, port), timeout_s).close()
    except (OSError, OverflowError, UnicodeError):
        return Daemon(Answerer.NOBODY, address, None)
    if segment.is_file():
        return Daemon(Answerer.HYPERPOD, address, url)
    return Daemon(Answerer.STRANGER, address, None)


def _is_hotspan(host: str, port: int, timeout_s: float) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        response = connection.getresponse()
        answer = json.loads(response.read(_MAX_ANSWER)) if response.status == 200 else None
    except (OSError, OverflowError, ValueError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return isinstance(answer, dict) and answer.get("service") == "hotspan-daemon"


# -- the CPU ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NativeType:
    """A dtype to serve with on the CPU, and why."""

    dtype: str
    why: str

    @property
    def has_bfloat16(self) -> bool:
        return self.dtype == "bfloat16"


def native_type(environment: Mapping[str, str], cpuinfo: Path = Path("/proc/cpuinfo")) -> NativeType:
    """bfloat16 where the CPU has instructions for it, else float32: emulated, bfloat16 takes over twice as long.

    environment: ONEDNN_MAX_CPU_ISA may forbid the instructions.
    """
    limit = environment.get(LIMIT, "").upper()
    if limit in _WITHOUT:
        return NativeType("float32", f"{LIMIT}={limit} leaves no bfloat16 instructions")
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return NativeType("bfloat16", "what this CPU can do is unknown")
    flags = {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()}
    found = sorted(_BFLOAT16 & flags)
    if found:
        return NativeType("bfloat16", f"this CPU has instructions for it ({', '.join(found)})")
    return NativeType("float32", "this CPU has no bfloat16 instructions, and emulates them")
