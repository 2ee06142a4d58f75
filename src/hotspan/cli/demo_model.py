"""`hotspan demo-model`: a model to try things with, made on the spot."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.core.errors import ConfigError


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Directory to write to. It must be empty or must not exist.")],
    size: Annotated[
        str, typer.Option(help="Size: tiny (3 million parameters, for tests) or demo (66 million parameters).")
    ] = "demo",
) -> None:
    """Create a small model with random weights, without a download."""
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
