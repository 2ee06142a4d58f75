"""`hotspan plan MODEL`: which tiers this machine would get, and what they would do for a working set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.options import runs
from hotspan.config.kinds import COUNT, POSITIVE
from hotspan.config.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan for."""

    workers: int = option(1, "Number of engines of this model on this host.", kind=COUNT)
    models: int = option(1, "Number of models of this size on this host.", kind=COUNT)
    tp: int = option(1, "Tensor-parallel size of each engine.", kind=COUNT)
    kv_dtype: str = option("auto", "Data type of the KV cache, as --kv-cache-dtype.")
    cpu: bool = option(False, "Device of the engine. Default: --gpu.", also="--gpu")
    disk: Path | None = option(
        None, "Directory for the disk tier. Implies --auto. Default: with --auto, common directories are checked."
    )
    auto: bool = option(
        False, "Plan for `hotspan serve --auto`. Default: plan for `hotspan serve` without tier options."
    )
    max_num_seqs: int | None = option(None, "Maximum number of concurrent requests, as --max-num-seqs.", kind=COUNT)
    measure: bool = option(
        True, "Measure disks by writing and reading up to 256 MiB each. Default: measure.", also="--no-measure"
    )
    users: int = option(100, "Number of texts in the working set.", kind=COUNT)
    tokens: int = option(10_000, "Tokens per text.", kind=COUNT)
    prefill_rate: float | None = option(
        None, "Prefill rate of the engine, in tokens per second. Default: unknown.", kind=POSITIVE
    )
    ram_rate: float | None = option(
        None, "Transfer rate between RAM and the engine, in GB/s. Default: unknown.", kind=POSITIVE
    )


@runs(PlanOptions)
def plan(
    options: PlanOptions,
    model: Annotated[str, typer.Argument(help="Directory of a model, or hub ID of a downloaded model.")],
) -> None:
    """Show the tiers that `hotspan serve` would choose on this host, and how much of a working set they hold."""
    from hotspan.config.environment import environment
    from hotspan.core.types import Tier
    from hotspan.plan.advice import advise, print_advice, print_plan
    from hotspan.plan.host import Host
    from hotspan.plan.shape import ModelShape
    from hotspan.plan.tiers import Extent, choose_tiers
    from hotspan.plan.weights import model_directory, weights_bytes

    directory = model_directory(model)
    shape = ModelShape.from_config(directory, kv_dtype=options.kv_dtype, tensor_parallel=options.tp)
    is_auto = options.auto or options.disk is not None
    directories = [] if not is_auto else None if options.disk is None else [options.disk]
    host = Host.probe(environment(), directories, is_measured=options.measure)
    chosen = choose_tiers(
        host,
        shape,
        workers=options.workers,
        models=options.models,
        is_cpu_engine=options.cpu,
        weights_bytes=weights_bytes(directory),
        requests=options.max_num_seqs,
        extent=Extent.ALL if is_auto else Extent.MODEST,
    )
    rates = {Tier.RAM: options.ram_rate or 0.0}
    for probe in host.disks:
        if chosen.disk is not None and probe.directory == chosen.disk.directory:
            rates[Tier.DISK] = probe.read_gb_s or 0.0
    print_plan(chosen)
    print_advice(
        advise(
            *(chosen, shape),
            users=options.users,
            tokens=options.tokens,
            gb_s=rates,
            prefill_tokens_per_s=options.prefill_rate,
        )
    )
