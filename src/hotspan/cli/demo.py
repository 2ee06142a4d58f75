"""`hotspan demo`: what hotspan does, on this machine, in a few minutes. `hotspan demo-model`: a model to try."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspan.cli.errors import explained
from hotspan.cli.options import built, flags_given, takes
from hotspan.config.options import options_of
from hotspan.demo.plan import DemoSizes, usable_threads

if TYPE_CHECKING:
    from hotspan.plan.cpu import NativeType


_SIZES = options_of(DemoSizes)


@takes(_SIZES)
def demo(
    context: typer.Context,
    output: Annotated[Path, typer.Option(help="Directory for the model, logs and the report.")] = Path("hotspan-demo"),
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of the model, as --dtype.", show_default="a type that this machine computes natively"
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(help="Number of engine threads. 0: all cores, minus one if there are more than two.")
    ] = 0,
    mode: Annotated[list[str] | None, typer.Option(help="Mode to run. May be repeated.", show_default="all")] = None,
    repetitions: Annotated[int, typer.Option(help="Number of runs of each mode. Medians are shown.")] = 1,
    results: Annotated[
        Path | None, typer.Option(help="Also write the results, without answers, to this JSON file.")
    ] = None,
    model_size: Annotated[str, typer.Option(help="Size of the demo model: demo or tiny.")] = "demo",
    port: Annotated[int, typer.Option(help="Port of the servers. 0: any free port.")] = 0,
    **_flags: Any,
) -> None:
    """Compare serving long texts without hotspan, from RAM, from disk, and after a restart."""
    from hotspan.bench.terminal import stdout_console
    from hotspan.demo.run import DemoRequest, run_demo

    is_fitted = not {"documents", "document_tokens"} & flags_given(context, _SIZES).keys()
    with explained():
        request = DemoRequest(
            output=output,
            sizes=built(DemoSizes, context),
            threads=threads or usable_threads(),
            dtype=_dtype(dtype),
            is_fitted=is_fitted,
            model_size=model_size,
            mode_names=tuple(mode or ()),
            repetitions=repetitions,
            results=results,
            port=port,
            command=shlex.join(["hotspan", *sys.argv[1:]]),
        )
        done = run_demo(request, stdout_console())
    if any(run.failed for run in done.runs):
        raise typer.Exit(1)


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Directory to write to. It must be empty or must not exist.")],
    size: Annotated[
        str, typer.Option(help="Size: tiny (3 million parameters, for tests) or demo (66 million parameters).")
    ] = "demo",
) -> None:
    """Create a small model with random weights, without a download."""
    from hotspan.demo.model import make_demo_model

    with explained():
        model = make_demo_model(directory, size)
    typer.echo(
        f"{model.path}: {model.parameters / 1e6:.1f} M random parameters ({model.weight_bytes / 2**20:.0f} MiB), "
        f"{model.kv_bytes_per_token:,} bytes of KV a token, {model.vocabulary:,} tokens in the vocabulary, "
        f"texts of up to {model.max_tokens:,} tokens."
    )
    typer.echo(f"Serve it: hotspan serve {model.path}")


def _dtype(given: str | None) -> "NativeType":
    """What the model is served in."""
    from hotspan.config.configuration import visible_gpus
    from hotspan.config.environment import environment
    from hotspan.plan.cpu import NativeType, native_type

    if given is not None:
        return NativeType(given, "as given")
    if visible_gpus(environment()):
        return NativeType("bfloat16", "the GPU computes it natively")
    return native_type(environment())
