"""`hotspan plan MODEL`: which tiers this machine would get, and what they would do for a working set."""

from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained


def plan(
    model: Annotated[str, typer.Argument(help="A model's directory, or the hub id of one that was downloaded.")],
    workers: Annotated[int, typer.Option(min=1, help="Engines of this model on this host.")] = 1,
    models: Annotated[int, typer.Option(min=1, help="Models that share this host, of this size.")] = 1,
    tp: Annotated[int, typer.Option(min=1, help="Ranks of one engine: its --tensor-parallel-size.")] = 1,
    kv_dtype: Annotated[str, typer.Option(help="The engine's --kv-cache-dtype.")] = "auto",
    cpu: Annotated[bool, typer.Option("--cpu/--gpu", help="Where the engine computes.")] = False,
    disk: Annotated[
        Path | None,
        typer.Option(help="Where the disk tier would live, with --auto; without it, the usual places are looked at."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Plan as `hotspan serve --auto` does; without it, as `hotspan serve` does.")
    ] = False,
    max_num_seqs: Annotated[int | None, typer.Option(min=1, help="The engine's --max-num-seqs.")] = None,
    measure: Annotated[
        bool, typer.Option("--measure/--no-measure", help="Write and read up to 256 MiB to see how fast disks are.")
    ] = True,
    users: Annotated[int, typer.Option(min=1, help="Texts that come back.")] = 100,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of such a text.")] = 10_000,
    prefill_rate: Annotated[
        float | None, typer.Option(min=0.001, help="Tokens a second that the engine computes, if you know it.")
    ] = None,
    ram_rate: Annotated[
        float | None, typer.Option(min=0.001, help="GB/s between RAM and the engine, if you know it.")
    ] = None,
) -> None:
    """Show which tiers `hotspan serve` would choose here and why, and how much of a working set they hold."""
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
