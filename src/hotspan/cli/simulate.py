"""`hotspan simulate`: request traces replayed over simulated replicas, routing strategies and tiers side by side."""

from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.cli.errors import explained
from hotspan.cli.options import built, takes
from hotspan.config.options import options_of
from hotspan.simulate.costs import Costs, Sizes

_SIZE = "May be repeated to compare sizes."


@takes(options_of(Costs))
def simulate(
    context: typer.Context,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            help="Trace: conversation, synthetic, toolagent, or a file in Mooncake's format. May be repeated. "
            "Default: conversation, synthetic."
        ),
    ] = None,
    strategy: Annotated[list[str] | None, typer.Option(help="Routing strategy. May be repeated. Default: all.")] = None,
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Number of simulated replicas.")] = 8,
    gpu_tokens: Annotated[
        list[int] | None,
        typer.Option(min=512, help=f"Capacity of the GPU's KV cache, in tokens. {_SIZE} Default: 750000."),
    ] = None,
    ram_gib: Annotated[
        list[float] | None, typer.Option(min=0.0, help=f"RAM tier per replica, in GiB. {_SIZE} Default: 0.")
    ] = None,
    disk_gib: Annotated[
        list[float] | None, typer.Option(min=0.0, help=f"Disk tier per replica, in GiB. {_SIZE} Default: 0.")
    ] = None,
    l2_gib: Annotated[list[float] | None, typer.Option(min=0.0, help=f"Shared L2, in GiB. {_SIZE} Default: 0.")] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy of the tiers: arc or lru. May be repeated. Default: arc."),
    ] = None,
    ram_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Transfer rate from RAM to the GPU, in GB/s.")] = 20.0,
    disk_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Transfer rate from disk to the GPU, in GB/s.")] = 3.0,
    l2_gb_per_s: Annotated[float, typer.Option(min=0.001, help="Transfer rate from the L2 to the GPU, in GB/s.")] = 1.5,
    event_delay_ms: Annotated[
        float,
        typer.Option(min=-1.0, help="Delay of KV events from a replica to the router, in ms. -1 disables events."),
    ] = 5.0,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Number of requests, at an unchanged rate. Default: as published, or the whole file."),
    ] = None,
    rate_scale: Annotated[float, typer.Option(min=0.01, max=100.0, help="Factor for the arrival rate.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Random seed of the first trace.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Number of seeds per trace. Means are shown.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the results to this JSON file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a report with plots to this HTML file.")] = None,
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the first trace to this file, in Mooncake's format, and exit.")
    ] = None,
    **_flags: Any,
) -> None:
    """Replay request traces on simulated replicas, with the routing policies of `hotspan route`."""
    with explained():
        from rich.console import Console

        from hotspan.router.types import Medium
        from hotspan.simulate.compare import Comparison
        from hotspan.simulate.routers import POLICIES
        from hotspan.simulate.show import as_json, print_lines, write_json
        from hotspan.simulate.simulation import Setup
        from hotspan.simulate.trace import sources, write

        traces = sources(trace or ["conversation", "synthetic"], requests, rate_scale)
        if write_trace is not None:
            write(write_trace, next(iter(traces.values()))(seed))
            typer.echo(f"written: {write_trace}")
            return
        rates = {Medium.RAM: ram_gb_per_s, Medium.DISK: disk_gb_per_s, Medium.L2: l2_gb_per_s}
        costs = built(Costs, context, load_gb_per_s=rates)
        evictions = eviction or [Sizes().eviction]
        tiers = product(gpu_tokens or [Sizes().gpu_tokens], ram_gib or [0.0], disk_gib or [0.0], l2_gib or [0.0])
        sizes = [Sizes(*each, name) for each in tiers for name in (evictions if any(each[1:]) else evictions[:1])]
        setup = Setup(replicas, costs, sizes[0], event_delay_ms / 1000 if event_delay_ms >= 0 else None)
        comparison = Comparison(traces, setup, strategy or POLICIES, sizes, seed, seeds)
        console = Console()
        with console.status("") as status:
            lines, facts = comparison.run(status.update)
        print_lines(lines, facts, console)
        if json is not None:
            write_json(json, as_json(comparison, lines, facts))
            typer.echo(f"written: {json}")
        if report is not None:
            from hotspan.simulate.report import write_report

            write_report(report, comparison, lines, facts)
            typer.echo(f"written: {report}")
