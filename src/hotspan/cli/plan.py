"""`hotspan plan MODEL`: which tiers this machine would get, and what they would do for a working set."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def plan(
    model: Annotated[str, typer.Argument(help="Directory of a model, or hub ID of a downloaded model.")],
    workers: Annotated[int, typer.Option(min=1, help="Number of engines of this model on this host.")] = 1,
    models: Annotated[int, typer.Option(min=1, help="Number of models of this size on this host.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of each engine.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="Data type of the KV cache, as --kv-cache-dtype.")] = "auto",
    cpu: Annotated[bool, typer.Option("--cpu/--gpu", help="Device of the engine.")] = False,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the disk tier. Implies --auto. Default: with --auto, common directories are checked."
        ),
    ] = None,
    auto: Annotated[
        bool,
        typer.Option(
            "--auto", help="Plan for `hotspan serve --auto`. Default: plan for `hotspan serve` without tier options."
        ),
    ] = False,
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of concurrent requests, as --max-num-seqs.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Measure disks by writing and reading up to 256 MiB each.")
    ] = True,
    users: Annotated[int, typer.Option(min=1, help="Number of texts in the working set.")] = 100,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens per text.")] = 10_000,
    prefill_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Prefill rate of the engine, in tokens per second. Default: unknown."),
    ] = None,
    ram_rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Transfer rate between RAM and the engine, in GB/s. Default: unknown."),
    ] = None,
) -> None:
    """Show the tiers that `hotspan serve` would choose on this host, and how much of a working set they hold."""
    with explained():
        from hotspan.config.environment import environment
        from hotspan.core.types import Tier
        from hotspan.plan.advice import advise
        from hotspan.plan.host import Host
        from hotspan.plan.shape import ModelShape
        from hotspan.plan.table import print_advice, print_plan
        from hotspan.plan.tiers import Extent, choose_tiers
        from hotspan.plan.weights import model_directory, weights_bytes

        directory = model_directory(model)
        shape = ModelShape.from_config(directory, kv_dtype=kv_dtype, tensor_parallel=tp)
        is_auto = auto or disk is not None
        directories = [] if not is_auto else None if disk is None else [disk]
        host = Host.probe(environment(), directories, is_measured=measure)
        chosen = choose_tiers(
            host,
            shape,
            workers=workers,
            models=models,
            is_cpu_engine=cpu,
            weights_bytes=weights_bytes(directory),
            requests=max_num_seqs,
            extent=Extent.ALL if is_auto else Extent.MODEST,
        )
        rates = {Tier.RAM: ram_rate or 0.0}
        for probe in host.disks:
            if chosen.disk is not None and probe.directory == chosen.disk.directory:
                rates[Tier.DISK] = probe.read_gb_s or 0.0
        print_plan(chosen)
        print_advice(advise(chosen, shape, users=users, tokens=tokens, gb_s=rates, prefill_tokens_per_s=prefill_rate))
