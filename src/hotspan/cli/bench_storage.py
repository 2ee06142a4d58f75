"""`hotspan bench storage`: how close the copies and the disk tier come to what this machine can do."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def storage(
    directory: Annotated[
        Path, typer.Option(help="Directory to measure. A temporary directory is created in it.")
    ] = Path("."),
    size_gib: Annotated[float, typer.Option(min=0.01, help="Size of the slab and of fio's file, in GiB.")] = 1.0,
    chunk_mib: Annotated[float, typer.Option(min=0.02, help="Chunk size, in MiB.")] = 14.0,
    threads: Annotated[int, typer.Option(min=1, help="Number of I/O threads and of fio jobs.")] = 4,
    repetitions: Annotated[int, typer.Option(min=1, help="Number of rounds. Medians are reported.")] = 3,
    output: Annotated[Path | None, typer.Option(help="Write results and machine data to this JSON file.")] = None,
    require_fio: Annotated[
        bool,
        typer.Option(
            "--require-fio", help="Fail with exit status 2 if fio is not installed. Default: measure without fio."
        ),
    ] = False,
) -> None:
    """Compare copies with memcpy and the disk tier with fio, in one run."""
    from hotspan.bench.storage import StorageBench, print_figures, write_figures

    with explained():
        bench = StorageBench(directory, size_gib, chunk_mib, threads, repetitions, require_fio)
        figures = bench.run()
    print_figures(bench, figures)
    if output is not None:
        write_figures(output, bench, figures)
        typer.echo(f"written: {output}")
