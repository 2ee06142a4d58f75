"""`hotspan doctor`: what a server with the same words would be open to, and what this machine is to it."""

import dataclasses
import importlib.util
from typing import TYPE_CHECKING, Any

import typer

from hotspan.cli.flags import Model, load
from hotspan.cli.options import built, takes
from hotspan.cli.output import Printing, explained, print_json
from hotspan.config.environment import environment
from hotspan.config.keys import FLAGS
from hotspan.config.options import options_of
from hotspan.core.errors import HotspanError
from hotspan.server.findings import Finding, Severity

if TYPE_CHECKING:
    from hotspan.server.options import ServeOptions


@takes((*FLAGS, *options_of(Printing)))
@explained()
def doctor(context: typer.Context, model: Model = None, **_flags: Any) -> None:
    """Check configuration and host for security problems before serving. Exit status 1: problems found.

    Who reaches what, with which key; what is encrypted; what is fetched and executed; who else reads the files.
    Nothing is started.
    """
    from hotspan.cli.serve import serve_options
    from hotspan.server.facts import Facts
    from hotspan.server.machine import machine, refusal
    from hotspan.server.posture import files_of, posture

    surroundings = environment()
    options: ServeOptions | None = None
    try:
        options = serve_options(load(context, model))
    except HotspanError as error:  # the machine can be looked at all the same
        facts = Facts.probe(surroundings)
        findings = [_refusal(error)]
    else:
        facts = Facts.probe(surroundings, files_of(options))
        facts = dataclasses.replace(facts, refusal=refusal(options, surroundings))
        findings = [*_refused(context, model), *posture(options, facts)]
    findings += machine(options, facts)
    if built(Printing, context).json:
        rows = [dataclasses.asdict(finding) | {"severity": finding.severity.value} for finding in findings]
        print_json(rows)
    else:
        _print(findings)
    if any(finding.severity is Severity.BAD for finding in findings):
        raise typer.Exit(1)


def _refused(context: typer.Context, model: str | None) -> list[Finding]:
    """What `hotspan config check` finds wrong, in one row; nothing where there is no vLLM to ask."""
    from hotspan.cli.checking import checked

    if importlib.util.find_spec("vllm") is None:
        return []
    try:
        checked(context, model)
    except HotspanError as error:
        return [_refusal(error)]
    return []


def _refusal(error: HotspanError) -> Finding:
    return Finding("configuration", Severity.BAD, "the server would refuse to start", str(error))


def _print(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

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
