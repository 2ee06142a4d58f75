"""`hotspan demo-model`: a model to try things with, made on the spot."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.core.errors import ConfigError


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where to write it: a directory that is empty or does not exist.")],
    size: Annotated[str, typer.Option(help="tiny (3 M parameters, for tests) or demo (66 M).")] = "demo",
) -> None:
    """Make a small model with random weights: it needs no download, and any engine can serve it."""
    from hotspan.demo.model import make_demo_model

    try:
        model = make_demo_model(directory, size)
    except ConfigError as error:
        typer.echo(f"hotspan: {error}", err=True)
        raise typer.Exit(2) from error
    typer.echo(
        f"{model.path}: {model.parameters / 1e6:.1f} M random parameters ({model.weight_bytes / 2**20:.0f} MiB), "
        f"{model.kv_bytes_per_token:,} bytes of KV a token, {model.vocabulary:,} tokens in the vocabulary, "
        f"texts of up to {model.max_tokens:,} tokens."
    )
    typer.echo(f"Serve it: hotspan serve {model.path}")
