"""`hotspan simulate`: request traces replayed over simulated replicas, routing strategies and tiers side by side."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hotspan.cli.options import givens_of, runs
from hotspan.cli.output import check_writable, print_json, print_written, stdout_console
from hotspan.config.kinds import COUNT, NOT_NEGATIVE, TEXTS, between, several
from hotspan.config.options import build, json_option, option, options_of
from hotspan.core.trace import read, write
from hotspan.simulate.costs import Blend, Costs, Setup, Sizes

if TYPE_CHECKING:
    from hotspan.simulate.recorded import Recorded

_SIZE = "May be repeated to compare sizes."


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """What to replay over what, and where the results go."""

    trace: tuple[str, ...] = option(
        ("conversation", "synthetic"),
        "Trace: conversation, synthetic, toolagent, documents, a file in Mooncake's format, or agents' sessions (a "
        "file or a directory). May be repeated. "
        "Default: conversation, synthetic.",
    )
    strategy: tuple[str, ...] = option((), "Routing strategy. May be repeated. Default: all.")
    replicas: tuple[int, ...] = option(
        (8,),
        "Number of simulated replicas. May be repeated to compare numbers. Default: 8.",
        kind=several(between(1, 4096)),
    )
    gpu_tokens: tuple[int, ...] = option(
        (Sizes().gpu_tokens,),
        f"Capacity of the GPU's KV cache, in tokens. {_SIZE} Default: {Sizes().gpu_tokens}.",
        kind=several(COUNT),
    )
    ram_gib: tuple[float, ...] = option(
        (0.0,), f"RAM tier per replica, in GiB. {_SIZE} Default: 0.", kind=several(NOT_NEGATIVE)
    )
    disk_gib: tuple[float, ...] = option(
        (0.0,), f"Disk tier per replica, in GiB. {_SIZE} Default: 0.", kind=several(NOT_NEGATIVE)
    )
    l2_gib: tuple[float, ...] = option((0.0,), f"Shared L2, in GiB. {_SIZE} Default: 0.", kind=several(NOT_NEGATIVE))
    eviction: tuple[str, ...] = option(
        (Sizes().eviction,),
        "Eviction policy of the tiers: arc, as the engine's, lru, or learned. May be repeated. Default: arc.",
        kind=TEXTS,
    )
    costs: Costs = field(default_factory=Costs)
    is_blending: bool = option(
        False,
        "Replicas reuse sections of prompts, such as documents, wherever they stand, as `hotspan serve --blend` does. "
        "Of traces that name sections, such as documents. Needs --ram-gib.",
        name="blend",
    )
    blend: Blend = field(default_factory=Blend)
    event_delay_ms: float = option(
        5.0, "Delay of KV events from a replica to the router, in ms. -1 disables events.", kind=between(-1, 1e9, float)
    )
    requests: int | None = option(
        None, "Number of requests, at an unchanged rate. Default: as published, or the whole file.", kind=COUNT
    )
    rate_scale: float = option(1.0, "Factor for the arrival rate.", kind=between(0.01, 100, float))
    seed: int = option(1, "Random seed of the first trace.")
    seeds: int = option(1, "Number of seeds per trace. Means are shown.", kind=between(1, 1000))
    json: bool = json_option()
    output: Path | None = option(None, "Write the results to this JSON file.")
    report: Path | None = option(None, "Write a report with plots to this HTML file.")
    write_trace: Path | None = option(None, "Write the first trace to this file, in Mooncake's format, and exit.")

    def sizes(self) -> list[Sizes]:
        """Each combination of sizes; without tiers there is nothing for several policies to evict from."""
        tiers = product(self.gpu_tokens, self.ram_gib, self.disk_gib, self.l2_gib)
        numbers = self.replicas if len(self.replicas) > 1 else (None,)
        return [
            Sizes(*each, name, replicas)
            for each in tiers
            for name in self.eviction[: None if any(each[1:]) else 1]
            for replicas in numbers
        ]


@runs(SimulateOptions)
def simulate(
    options: SimulateOptions,
    context: typer.Context,
    traces: Annotated[list[str] | None, typer.Argument(help="Traces, as --trace takes them.")] = None,
) -> None:
    """Replay request traces on simulated replicas, with the routing policies of `hotspan route`.

    A trace of `hotspan trace record` says what the server was: it is simulated with the server's own sizes and rates,
    as far as no option names others.
    """
    given = {each.key: each.value for each in givens_of(context, options_of(SimulateOptions))}
    given["trace"] = (*(traces or ()), *given.get("trace", () if traces else options.trace))
    recorded = _recorded(given["trace"], options.requests)
    _simulate(build(SimulateOptions, recorded.options | given), recorded, recorded.differences(given))


def _recorded(names: Sequence[str], requests: int | None) -> "Recorded":
    """What a single recorded trace tells of its server; nothing of others, nor of several."""
    from hotspan.simulate.recorded import Recorded
    from hotspan.simulate.shapes import SHAPES

    if len(names) != 1 or names[0] in SHAPES or not Path(names[0]).exists():
        return Recorded()
    return Recorded.of(read(Path(names[0]), requests))


def _simulate(options: SimulateOptions, recorded: "Recorded", other: Sequence[str]) -> None:
    """other: how what is simulated differs from the recorded server, a line each."""
    from hotspan.bench.machine import results, write_results
    from hotspan.simulate.compare import Comparison
    from hotspan.simulate.report import write_report
    from hotspan.simulate.routers import POLICIES
    from hotspan.simulate.shapes import sources
    from hotspan.simulate.show import as_json, print_lines

    for path in (options.write_trace, options.output, options.report):
        if path is not None:
            check_writable(path)
    traces = sources(options.trace, options.requests, options.rate_scale)
    if options.write_trace is not None:
        write(options.write_trace, next(iter(traces.values()))(options.seed))
        print_written(options.write_trace, is_json=options.json)
        return
    sizes = options.sizes()
    delay_s = options.event_delay_ms / 1000 if options.event_delay_ms >= 0 else None
    blend = options.blend if options.is_blending else None
    setup = Setup(options.replicas[0], options.costs, sizes[0], delay_s, blend=blend)
    setup = replace(setup, gpu_block_tokens=recorded.block_tokens or setup.gpu_block_tokens)
    comparison = Comparison(traces, setup, options.strategy or POLICIES, sizes, options.seed, options.seeds)
    console = stdout_console(is_json=options.json)
    with console.status("") as status:
        lines, facts = comparison.run(status.update)
    print_lines(lines, facts, console)
    for line in other or recorded.doubts(lines[0].hit_rate, lines[0].ttft_s("mean"), facts[lines[0].trace][0]):
        console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    if options.json:
        print_json(results("routing", **as_json(comparison, lines, facts)))
    if options.output is not None:
        write_results(options.output, "routing", **as_json(comparison, lines, facts))
        print_written(options.output, is_json=options.json)
    if options.report is not None:
        write_report(options.report, comparison, lines, facts)
        print_written(options.report, is_json=options.json)
