"""`hotspan bench storage`: how close the copies and the disk tier come to what this machine can do."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def storage(
    directory: Annotated[
        Path, typer.Option(help="Where the disk tier would live; a directory is made in it and removed.")
    ] = Path("."),
    size_gib: Annotated[float, typer.Option(min=0.01, help="Size of the slab and of fio's file.")] = 1.0,
    chunk_mib: Annotated[float, typer.Option(min=0.02, help="Size of a chunk.")] = 14.0,
    threads: Annotated[int, typer.Option(min=1, help="I/O threads, and fio's jobs.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds; the medians are reported.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
    require_fio: Annotated[bool, typer.Option("--require-fio", help="Exit with status 2 without fio.")] = False,
) -> None:
    """Measure copies against memcpy and the disk tier against fio, side by side in one run."""
    from hotspan.bench.storage import StorageBench, print_figures, write_figures

    with explained():
        bench = StorageBench(directory, size_gib, chunk_mib, threads, repetitions, require_fio)
        figures = bench.run()
    print_figures(bench, figures)
    if output is not None:
        write_figures(output, bench, figures)
        typer.echo(f"written: {output}")
