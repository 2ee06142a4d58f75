"""`hotspan simulate`: request traces replayed over simulated replicas, routing strategies and tiers side by side."""

from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from hotspan.cli.errors import explained

_SIZE = "Repeat it to compare sizes."


def simulate(
    trace: Annotated[
        list[str] | None,
        typer.Option(help="conversation, synthetic or toolagent, or a file in Mooncake's format; can be repeated."),
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="One to compare; can be repeated. Without it, all of them.")
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=4096, help="Simulated replicas.")] = 8,
    prefill_tokens_per_s: Annotated[float, typer.Option(min=1.0, help="Of one replica, as measured.")] = 8000.0,
    attention_s: Annotated[
        float, typer.Option(min=0.0, help="The quadratic part: seconds for a token, times the tokens before it.")
    ] = 0.0,
    decode_step_s: Annotated[float, typer.Option(min=1e-6, help="To decode a token of one request.")] = 0.02,
    request_step_s: Annotated[float, typer.Option(min=0.0, help="More for each other request.")] = 0.0002,
    step_tokens: Annotated[int, typer.Option(min=1, help="The engine's --max-num-batched-tokens.")] = 512,
    max_running: Annotated[int, typer.Option(min=1, help="The engine's --max-num-seqs.")] = 256,
    gpu_tokens: Annotated[
        list[int] | None, typer.Option(min=512, help=f"Tokens that a GPU's pool keeps. {_SIZE}  [default: 750000]")
    ] = None,
    ram_gib: Annotated[list[float] | None, typer.Option(min=0.0, help=f"Of a replica's RAM tier. {_SIZE}")] = None,
    disk_gib: Annotated[list[float] | None, typer.Option(min=0.0, help=f"Of its disk tier. {_SIZE}")] = None,
    l2_gib: Annotated[list[float] | None, typer.Option(min=0.0, help=f"Of the L2 that all share. {_SIZE}")] = None,
    eviction: Annotated[
        list[str] | None, typer.Option(help="Of the tiers: arc or lru; repeat it to compare.  [default: arc]")
    ] = None,
    kv_bytes: Annotated[int, typer.Option(min=1, help="Of a token, as `hotspan plan` says.")] = 131_072,
    ram_gb_per_s: Annotated[float, typer.Option(min=0.001, help="From RAM to the GPU.")] = 20.0,
    disk_gb_per_s: Annotated[float, typer.Option(min=0.001, help="From disk to the GPU.")] = 3.0,
    l2_gb_per_s: Annotated[float, typer.Option(min=0.001, help="From L2 to the GPU.")] = 1.5,
    event_delay_ms: Annotated[
        float, typer.Option(min=-1.0, help="From a change in a replica's caches to the router; -1: no events.")
    ] = 5.0,
    requests: Annotated[
        int | None, typer.Option(min=1, help="So many, at the same rate.  [default: as published, or the whole file]")
    ] = None,
    rate_scale: Annotated[float, typer.Option(min=0.01, max=100.0, help="Arrivals come so many times as fast.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the first trace.")] = 1,
    seeds: Annotated[int, typer.Option(min=1, max=1000, help="Traces of each shape; the means are shown.")] = 1,
    json: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with plots.")] = None,
    write_trace: Annotated[
        Path | None, typer.Option(help="Write the first trace in Mooncake's format, and stop.")
    ] = None,
) -> None:
    """Replay traces over simulated replicas behind the router's own policy, on this CPU, in seconds."""
    with explained():
        from rich.console import Console

        from hotspan.router.types import Medium
        from hotspan.simulate.compare import Comparison
        from hotspan.simulate.costs import Costs, Sizes
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
        costs = Costs(
            prefill_tokens_per_s=prefill_tokens_per_s,
            attention_s=attention_s,
            step_s=decode_step_s,
            request_step_s=request_step_s,
            step_tokens=step_tokens,
            max_running=max_running,
            kv_bytes=kv_bytes,
            load_gb_per_s=rates,
        )
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
