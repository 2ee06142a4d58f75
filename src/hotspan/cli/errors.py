"""How a command ends when what was asked for can't work: one sentence, exit status 2, no traceback."""

import contextlib
from collections.abc import Iterator

import typer

from hotspan.core.errors import HotspanError


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Turn hotspan's errors into a line on stderr and exit status 2."""
    try:
        yield
    except HotspanError as error:
        typer.secho(f"hotspan: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from error
