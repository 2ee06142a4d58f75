"""hotspan under load, beside vLLM's offloading, LMCache and the engine alone: a trained model and real texts.

usage: python -m benchmarks.under_load [--systems hotspan hotspan-always ...] [--clients 1 8 ...] [--arrivals 0.8 ...]
           [--workload documents] [--popularity uniform] [--requests N] [--rounds 1] [--tier disk] [--seed 42]
           [--dtype bfloat16] [--ram-gib 0.2] [--peers-ram-gib 0.3] [--limit-s 900] [--nice 0]
           [--python-peers .venv-peers/bin/python] [--work DIRECTORY, which keeps the logs]
           [--output benchmarks/results/under-load.json]

`--clients`: so many clients, each of which asks the next question when its own was answered. `--arrivals`: questions
come at Poisson times, at this share of the requests per second that the engine alone answers with 16 clients, measured
first. Without both: 1, 2, 4, 8, 16, 32 clients and 0.5, 0.8, 1.0, 1.3.

The engine's own pool has 17,408 tokens, RAM 9,300 (12 texts of 880; 0.3 GiB for the peers), the lower tier all.

    documents   questions about 60 texts of 880 tokens, which were all asked about once
    chat        24 conversations or more in turn, which grow by 220 tokens per turn, from 440 to 2,200
    agents      sessions of coding agents: the first 767 tokens are the same for all, prompts grow up to 4,000 tokens,
                clients think between two turns, shapes from recorded sessions (benchmarks/assets/agents/shapes.json)

    hotspan         as `hotspan serve` is, with the tier below RAM that --tier names
    hotspan-always  loads all that is there (no cost model, 5 s of patience)
    hotspan-never   has RAM alone
    vllm-fs         vLLM's OffloadingConnector with files
    lmcache-disk    LMCache in process with a disk; `make under-load` makes the environment that has it
    none            the engine alone
    and any other of benchmarks/peers/systems.py

Without --dtype the model is served in bfloat16 where the CPU computes it natively, else in float32, with twice as much
KV and RAM.

In each round every system is started once, in turn, and gets the same requests in the same order; its points follow
one another. Before a point, what it is about is asked once, unmeasured; the engine alone is asked for the last of it
only, twice what its pool holds. The figures are medians of the rounds. Answers are compared with those of `none` in the
same round: requests that run together are summed in another order, so that some differ without a fault. The engine's
threads spin while they wait for each other: other work on their cores makes all figures useless. `--nice -15`, as root,
runs the systems before it.
"""

import asyncio
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness import arguments
from benchmarks.load.figures import Figures, median, table
from benchmarks.load.measure import Measured, Point, Setting, measure
from benchmarks.load.systems import NAMES, TIERS, is_ours, systems
from benchmarks.load.workloads import BLOCK_TOKENS, WORKLOADS
from benchmarks.peers.systems import Place, Sizes, System
from benchmarks.real_model import KV_BYTES_PER_TOKEN, real_model
from hotspan.bench.machine import write_results
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.demo.plan import GIB, EngineSettings, usable_threads
from hotspan.plan.host import native_type

CLIENTS: Final = (1, 2, 4, 8, 16, 32)
SHARES: Final = (0.5, 0.8, 1.0, 1.3)
REQUESTS: Final = {1: 60, 3: 120, 8: 200, 32: 400}
"""By clients, those between them interpolated. Arrivals have as many as 8 clients."""

RAM_GIB, PEERS_RAM_GIB = 0.2, 0.3
"""Of a model in bfloat16: for 12 texts of 880 tokens, and somewhat more for systems that keep a part of it free."""

CAPACITY: Final = Point(requests=100, clients=16)
PEERS: Final = Path(".venv-peers/bin/python")
POOL_TOKENS: Final = 17 * 1024
"""Of the engine's own pool, in every workload: 17 requests about a text of 880 tokens."""

Rounds = dict[str, dict[str, list[Figures]]]
"""Figures by point, system and round."""


def wide(dtype: str) -> int:
    """How many times as many bytes KV has as in bfloat16."""
    return 2 if dtype == "float32" else 1


def requests_of(clients: int) -> int:
    return round(float(np.interp(clients, [*REQUESTS], [*REQUESTS.values()])))


def points_of(clients: Sequence[int] | None, shares: Sequence[float] | None, requests: int) -> list[Point]:
    """The points in their order; all if neither is given. requests: of each, 0 for as many as clients need."""
    if clients is None and shares is None:
        clients, shares = CLIENTS, SHARES
    closed = [Point(requests or requests_of(each), clients=each) for each in clients or ()]
    return closed + [Point(requests or REQUESTS[8], share=each) for each in shares or ()]


class Comparison:
    """Systems in turn, over one model and workload."""

    def __init__(self, options: Any, model: Path, setting: Setting, work: Path) -> None:
        self._options, self._model, self._setting, self._work = options, model, setting, work
        self.systems = systems(options.tier)
        self.capacity_per_s = 0.0
        self.rounds: Rounds = {}

    def run(self) -> None:
        """Measure everything; `rounds` grows as it goes on."""
        points = self._setting.points
        if any(point.share for point in points):
            found = self._measured("none", "capacity", replace(self._setting, points=(CAPACITY,)), {})
            self.capacity_per_s = found.figures[CAPACITY.name].get("requests_per_s", 0.0)
            if not self.capacity_per_s:
                raise SystemExit(f"the engine's own throughput is unknown: {found.figures[CAPACITY.name]}")
            print(f"the engine alone: {self.capacity_per_s:.2f} requests/s", flush=True)
            points = [replace(point, per_s=point.share * self.capacity_per_s) for point in points]
        setting = replace(self._setting, points=points)
        names = sorted(self._options.systems, key=lambda name: name != "none")  # it answers what others are held to
        for number in range(self._options.rounds):
            reference: Mapping[str, str] = {}
            for name in names:
                found = self._measured(name, f"{name}-{number}", setting, reference)
                reference = found.answers if name == "none" else reference
                for point, figures in found.figures.items():
                    self.rounds.setdefault(point, {}).setdefault(name, []).append(figures)
                    shown = {key: value for key, value in figures.items() if key != "metrics"}
                    print(f"== round {number + 1}, {name}, {point}: {shown}", flush=True)

    def medians(self) -> dict[str, dict[str, Figures]]:
        """Of the rounds that were measured; in the order of --systems."""
        return {
            point: {
                name: median([run for run in rows[name] if "error" not in run] or rows[name])
                for name in self._options.systems
                if name in rows
            }
            for point, rows in self.rounds.items()
        }

    def titles(self) -> dict[str, str]:
        return {name: self.systems[name].title for name in self._options.systems}

    def _measured(self, name: str, directory: str, setting: Setting, reference: Mapping[str, str]) -> Measured:
        system: System = self.systems[name]
        python = self._options.python_peers if name.startswith("lmcache") else sys.executable
        if name == "none":
            setting = replace(setting, most_filled=2 * POOL_TOKENS // setting.workload.fill_tokens)
        place = Place.below(self._work, directory, self._model, self._sizes(name), python)
        return asyncio.run(measure(system, place, setting, reference))

    def _sizes(self, name: str) -> Sizes:
        """The same pool and lower tier for all; RAM as --ram-gib and --peers-ram-gib give it."""
        tokens = self._setting.workload.tokens(len(self._setting.points))
        everything = round(1.1 * tokens * wide(self._options.dtype) * KV_BYTES_PER_TOKEN / GIB, 3)
        ram_gib = self._options.ram_gib if is_ours(name) else self._options.peers_ram_gib
        return Sizes(POOL_TOKENS // BLOCK_TOKENS, tokens // BLOCK_TOKENS, everything, ram_gib)


def parsed() -> Any:
    options = arguments(
        __doc__,
        systems=list(NAMES),
        clients=list[int],
        arrivals=list[float],
        workload=tuple(WORKLOADS),
        popularity=("uniform", "zipf"),
        requests=0,
        rounds=1,
        tier=TIERS,
        seed=42,
        dtype="",
        ram_gib=0.0,
        peers_ram_gib=0.0,
        python_peers=str(PEERS.absolute()) if PEERS.is_file() else sys.executable,
        limit_s=900.0,
        nice=0,
        cache="~/.cache/hotspan/real-model",
        work=Path,
    )
    options.dtype = options.dtype or native_type(os.environ).dtype
    options.ram_gib = options.ram_gib or round(RAM_GIB * wide(options.dtype), 3)
    options.peers_ram_gib = options.peers_ram_gib or round(PEERS_RAM_GIB * wide(options.dtype), 3)
    unknown = sorted(set(options.systems) - set(systems(options.tier)))
    if unknown:
        raise SystemExit(f"there is no system {unknown[0]!r}: {', '.join(systems(options.tier))}")
    return options


def main() -> None:
    options = parsed()
    with ExitStack() as stack:
        work = options.work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hotspan-load-")))
        work.mkdir(parents=True, exist_ok=True)
        try:
            model = real_model(Path(options.cache))
            workload = WORKLOADS[options.workload](Path(options.cache), model, options.popularity)
        except ConfigError as error:
            raise SystemExit(str(error)) from None
        engine = EngineSettings(max_model_len=workload.request_tokens, threads=usable_threads(), dtype=options.dtype)
        points = points_of(options.clients, options.arrivals, options.requests)
        aftermath = stack.enter_context(Aftermath())
        setting = Setting(engine, workload, points, options.seed, options.limit_s, aftermath, nice=options.nice)
        comparison = Comparison(options, model, setting, work)
        try:
            comparison.run()
        finally:
            medians = comparison.medians()
            print(table(medians, comparison.titles()))
            if options.output and medians:
                write_results(
                    *(options.output, "under-load", "python -m benchmarks.under_load"),
                    **_settings(options),
                    capacity_per_s=comparison.capacity_per_s,
                    medians=medians,
                    rounds=comparison.rounds,
                )


def _settings(options: Any) -> dict[str, Any]:
    kept = ("dtype", "nice", "workload", "popularity", "tier", "seed", "ram_gib", "peers_ram_gib")
    return {"pool_tokens": POOL_TOKENS, "cores": usable_threads(), **{key: getattr(options, key) for key in kept}}


if __name__ == "__main__":
    main()
