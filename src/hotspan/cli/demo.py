"""`hotspan demo`: what hotspan does, on this machine, in a few minutes. `hotspan demo-model`: a model to try."""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.options import flags_given, runs
from hotspan.cli.output import stdout_console
from hotspan.config.options import option, options_of
from hotspan.demo.plan import DemoRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOptions:
    """Which demo model to create."""

    size: str = option("demo", "Size: tiny (3 million parameters, for tests) or demo (66 million parameters).")


@runs(DemoRequest)
def demo(request: DemoRequest, context: typer.Context) -> None:
    """Compare serving long texts without hotspan, from RAM, from disk, and after a restart."""
    from hotspan.demo.run import run_demo

    is_fitted = not {"documents", "document_tokens"} & flags_given(context, options_of(DemoRequest)).keys()
    command = shlex.join(["hotspan", *sys.argv[1:]])
    done = run_demo(replace(request, is_fitted=is_fitted, command=command), stdout_console())
    if any(run.failed for run in done.runs):
        raise typer.Exit(1)


@runs(ModelOptions)
def demo_model(
    options: ModelOptions,
    directory: Annotated[Path, typer.Argument(help="Directory to write to. It must be empty or must not exist.")],
) -> None:
    """Create a small model with random weights, without a download."""
    from hotspan.demo.model import make_demo_model

    model = make_demo_model(directory, options.size)
    typer.echo(
        f"{model.path}: {model.parameters / 1e6:.1f} M random parameters ({model.weight_bytes / 2**20:.0f} MiB), "
        f"{model.kv_bytes_per_token:,} bytes of KV a token, {model.vocabulary:,} tokens in the vocabulary, "
        f"texts of up to {model.max_tokens:,} tokens."
    )
    typer.echo(f"Serve it: hotspan serve {model.path}")
