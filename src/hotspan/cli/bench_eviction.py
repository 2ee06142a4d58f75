"""`hotspan bench eviction`: what the tiers' eviction policy finds of public request traces, beside other policies."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def eviction(
    seed: Annotated[int, typer.Option(help="Of the first trace.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, help="Traces of each shape; the means are reported.")] = 3,
    scale: Annotated[float, typer.Option(min=0.001, max=10.0, help="Of the published number of requests.")] = 1.0,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
) -> None:
    """Replay traces of the shape of Mooncake's through eviction policies, on this CPU (some minutes)."""
    from rich.console import Console

    from hotspan.bench.eviction import EvictionBench, print_figures, write_figures

    console = Console()
    with explained():
        bench = EvictionBench(seed, seeds, scale)
        with console.status("") as status:
            figures = bench.run(status.update)
    print_figures(bench, figures, console)
    if output is not None:
        write_figures(output, bench, figures)
        typer.echo(f"written: {output}")
