"""One system under load: started, filled, then one point after the other."""

import asyncio
import gc
import os
import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.load.figures import Figures, figures_of
from benchmarks.load.rounds import Arrivals, Clients, Plays, Thinking, Turn
from benchmarks.load.workloads import Workload
from benchmarks.peers.measure import Asked
from benchmarks.peers.systems import Place, System, start
from hotspan.bench.prose import prose
from hotspan.bench.records import RequestRecord
from hotspan.bench.workloads.base import ClosedLoop, Prompt, RoundName, Send
from hotspan.core.aftermath import Aftermath
from hotspan.demo.plan import EngineSettings

FILLING: Final = 1
"""Requests at a time while the caches are filled."""

Answers = dict[str, str]


@dataclass(frozen=True, slots=True)
class Point:
    """A load: `clients` that wait for their answers, else `share` of what the engine alone can answer per second."""

    requests: int
    clients: int = 0
    share: float = 0.0
    per_s: float = 0.0

    @property
    def name(self) -> str:
        if self.clients:
            return f"{self.clients} clients" if self.clients > 1 else "1 client"
        return f"arrivals at {self.share:g} of the engine's own throughput"

    def plays(self, turns: Sequence[Turn], seed: int, *, is_thinking: bool) -> Plays:
        if not self.clients:
            return Arrivals(turns, self.per_s, seed)
        return (Thinking if is_thinking else Clients)(turns, self.clients)


@dataclass(frozen=True, slots=True)
class Setting:
    """What all systems of a run have in common.

    limit_s:     for one point, and for its fill, before it is given up.
    most_filled: requests of a fill that are asked, the last ones; 0 for all.
    nice:        of the systems' processes, from when they serve; below 0 they run before the machine's others.
    """

    engine: EngineSettings
    workload: Workload
    points: Sequence[Point]
    seed: int
    limit_s: float
    aftermath: Aftermath
    most_filled: int = 0
    nice: int = 0


@dataclass(frozen=True, slots=True)
class Measured:
    """The figures of each point, and the answers to all requests."""

    figures: dict[str, Figures]
    answers: Answers


async def measure(system: System, place: Place, setting: Setting, reference: Mapping[str, str]) -> Measured:
    """One start of a system, all points. A point that can't be measured has `error` instead of figures.

    Leaves nothing in the place but its logs.
    """
    found, answers = dict[str, Figures](), Answers()
    try:
        with system.store(place, setting.aftermath) as store:
            running = await asyncio.to_thread(start, system, place, setting.engine, setting.aftermath)
            try:
                stands = [*running.pids, *(store.pids if store else ())]  # with what a remote host would compute
                for pid in stands if setting.nice else ():
                    prioritise(pid, setting.nice)
                async with Asked(running, store) as asked:
                    for n in range(2):
                        await asked.send(Prompt("warm", f"Warm-up {n}: {prose(n, 300)}", 4))
                    for number, point in enumerate(setting.points):
                        found[point.name] = await _point(asked, number, point, setting, reference, answers)
            finally:
                await asyncio.to_thread(running.end, signal.SIGTERM)
    except SystemExit as error:
        why = " ".join(str(error).splitlines())
        found |= {point.name: {"error": why} for point in setting.points if point.name not in found}
    finally:
        shutil.rmtree(place.store, ignore_errors=True)
    return Measured(found, answers)


def prioritise(group: int, nice: int) -> None:
    """Give all processes of a group, which has a session of its own, that nice value.

    Where Linux shares the CPU by sessions (sched_autogroup), it is the session's value that counts.
    """
    session = Path(f"/proc/{group}/autogroup")
    if session.exists():
        session.write_text(f"{nice}")
    os.setpriority(os.PRIO_PGRP, group, nice)


async def _point(
    asked: Asked, number: int, point: Point, setting: Setting, reference: Mapping[str, str], answers: Answers
) -> Figures:
    stretch = setting.workload.stretch(number, point.requests, setting.seed)
    plays = point.plays(stretch.turns, setting.seed + number, is_thinking=setting.workload.is_thinking)
    records: list[RequestRecord] = []

    async def send(prompt: Prompt, due_time: float | None = None) -> RequestRecord:
        record = replace(await asked.send(prompt, len(records)), due_time=due_time)
        records.append(record)
        return record

    try:
        async with asyncio.timeout(setting.limit_s):
            fill = ClosedLoop(RoundName.WARM_UP, stretch.fill[-setting.most_filled :], FILLING)
            fill_s = await _timed(fill, send)
        unfilled = sum(not record.successful for record in records)
        records.clear()
        before, cpu_s = await asked.metrics(), await asked.cpu_s()
        async with asyncio.timeout(setting.limit_s):
            wall_s = await _timed(plays, send)
        cpu_s = await asked.cpu_s() - cpu_s
    except TimeoutError:
        return {"error": f"not answered within {setting.limit_s:g} s"}
    answers |= {record.request_id: record.answer for record in records if record.successful}
    after = await asked.metrics()
    found = figures_of(records, wall_s, cpu_s, before, after, reference)
    return found | {"fill_s": round(fill_s, 3), "fill_failed": unfilled}


async def _timed(plays: Plays, send: Send) -> float:
    """Seconds until all is answered. Garbage collection, which takes tens of milliseconds, does not delay requests."""
    gc.freeze()
    try:
        started = time.monotonic()
        await plays.play(send, time.monotonic)
        return time.monotonic() - started
    finally:
        gc.unfreeze()
