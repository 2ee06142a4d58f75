"""`hotspan serve MODEL`: hotspan's options, and after them whatever vLLM takes."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained

OWN_OPTIONS = (
    "--ram-gib",
    "--disk",
    "--disk-gib",
    "--chunk-tokens",
    "--no-cache",
    "--model-digest",
    "--host",
    "--port",
)


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A model's directory, or its hub id.")],
    ram_gib: Annotated[float, typer.Option(help="RAM tier, in GiB of /dev/shm.")] = 4.0,
    disk: Annotated[Path | None, typer.Option(help="Disk tier: a directory of its own, best on NVMe.")] = None,
    disk_gib: Annotated[float | None, typer.Option(help="Disk tier, in GiB; allocated at the start.")] = None,
    chunk_tokens: Annotated[int, typer.Option(help="Tokens kept and found as one.")] = 256,
    model_digest: Annotated[
        str, typer.Option(help="How weights are told apart: sampled (fast) or full (reads all of them).")
    ] = "sampled",
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Serve without hotspan's tiers.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8080,
) -> None:
    """Serve MODEL with an OpenAI API; long texts are computed once.

    Every option of `vllm serve` may follow, such as --dtype, --max-model-len or --tensor-parallel-size.
    """
    with explained():
        from hotspan.config.settings import cache_settings
        from hotspan.server.options import ServeOptions
        from hotspan.server.run import run_server

        settings = None
        if not no_cache:
            settings = cache_settings(
                ram_gib=ram_gib, disk=disk, disk_gib=disk_gib, chunk_tokens=chunk_tokens, model_digest=model_digest
            )
        run_server(ServeOptions(model, host, port, settings, tuple(context.args)), OWN_OPTIONS)
