"""`hotspan bench index`: what look-ups, names, invalidations and a restart cost."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def index(
    chunks: Annotated[int, typer.Option(min=400, help="Chunks in the index.")] = 100_000,
    repetitions: Annotated[int, typer.Option(min=1, help="Rounds; the medians are reported.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Write the figures and the machine's facts as JSON.")] = None,
) -> None:
    """Measure the index: opening it again, looking a text up, naming its chunks, invalidating."""
    from hotspan.bench.index import IndexBench, print_durations, write_durations

    bench = IndexBench(chunks, repetitions)
    with explained():
        durations = bench.run()
    print_durations(durations)
    if output is not None:
        write_durations(output, bench, durations)
        typer.echo(f"written: {output}")
