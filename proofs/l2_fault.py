"""R4 and R1 with an L2 in the place of the disk: the n-th system call fails, falls short, hangs, or is the last one.

Replicas share a directory. A process that dies at a call makes no other: all of its calls from that one on fail, and it
is gone before anybody hears of that.
"""

import errno
import gc
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

from hotspan.core.clock import Clock
from kit.places import in_memory
from kit.proof import Findings, Progress, rng_of
from kit.simulated.faults import SHORT
from proofs.engine import Broken
from proofs.fault import open_fds
from proofs.l2_files import HANG, HangingFiles, Said, SharedDirectory, hooked
from proofs.replica import Replica
from proofs.replicas import World

ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE, "short": SHORT, "hang": HANG}
WEIGHTS = {"arrive": 20, "ask": 16, "end_store": 10, "turn": 30, "step": 12, "poll": 8, "time": 6, "invalidate": 4}
"""The one fault is all that goes wrong."""

_KILL = "kill"
_TIMEOUT_S = 5.0
_HANG_TIMEOUT_S = 0.1
_BATCH = 50
"""Faults that one process takes at a time."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One way in which one call fails. case: its number. kind: an error, or a kill."""

    case: int
    nth: int
    kind: str
    is_lasting: bool
    is_sealed: bool

    def __str__(self) -> str:
        how = "from call" if self.is_lasting else "at call"
        return f"{self.kind} {how} {self.nth}, {'sealed' if self.is_sealed else 'plain'}"


@dataclass(slots=True)
class Tally:
    """What came of the faults."""

    calls: list[int] = field(default_factory=list)
    runs: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*ERRORS, _KILL), 0))
    trips: int = 0
    l2_hits: int = 0
    invalidations: int = 0
    heal_s: float = 0.0
    leaked_fds: int = 0

    def add(self, other: "Tally") -> None:
        """Count what came of other faults, too."""
        for kind, count in other.runs.items():
            self.runs[kind] += count
        self.trips += other.trips
        self.l2_hits += other.l2_hits
        self.invalidations += other.invalidations
        self.heal_s = max(self.heal_s, other.heal_s)
        self.leaked_fds += other.leaked_fds


class _Mortals(World):
    """Replicas of which one dies of the fault."""

    files: HangingFiles

    def after(self, replica: Replica) -> None:
        if self.files.hits:
            self.files.disarm()
            self.files.hits = 0
            replica.start()


def sweep(steps: int, every: int, seed: int, only: int | None, findings: Findings, progress: Progress) -> Tally:
    """The scenario once for every fault, on all cores; all that breaks is a finding."""
    tally = Tally()
    for is_sealed in (False, True):
        tally.calls.append(0)
        try:
            tally.calls[is_sealed] = meet(Fault(0, 0, "none", False, is_sealed), steps, seed, Tally())
        except (Broken, AssertionError) as error:
            findings.add(0, f"without a fault: {error}")
    faults = [fault for fault in _faults(tally.calls) if only is None or fault.case == only]
    faults = faults if only is not None else faults[::every]
    batches = [faults[at : at + _BATCH] for at in range(0, len(faults), _BATCH)]
    with ExitStack() as stack:
        if len(batches) > 1:
            context = multiprocessing.get_context("spawn")  # a fork would copy the threads' locks
            pool = stack.enter_context(ProcessPoolExecutor(len(os.sched_getaffinity(0)), context))
            outcomes = pool.map(partial(_meet_all, steps, seed), batches)
        else:
            outcomes = map(partial(_meet_all, steps, seed), batches)
        for number, (part, broken) in enumerate(outcomes, 1):
            tally.add(part)
            for case, what in broken:
                findings.add(case, what)
            progress(min(number * _BATCH, len(faults)), len(faults))
    return tally


def _meet_all(steps: int, seed: int, faults: list[Fault]) -> tuple[Tally, list[tuple[int, str]]]:
    """Meet the faults one after the other: what came of them, and each case that broke with the reason."""
    tally, broken, fds = Tally(), [], open_fds()
    for fault in faults:
        try:
            meet(fault, steps, seed, tally)
        except (Broken, AssertionError) as error:
            broken.append((fault.case, f"{fault}: {error}"))
        tally.runs[fault.kind] += 1
    gc.collect()  # processes that crashed are rings, and hold their slabs
    tally.leaked_fds = len(open_fds() - fds)
    return tally, broken


def meet(fault: Fault, steps: int, seed: int, tally: Tally) -> int:
    """The scenario with one fault: how many calls there were until it was gone. Raises: Broken, AssertionError."""
    files, said = HangingFiles(), Said()
    timeout_s = _HANG_TIMEOUT_S if fault.kind == "hang" else _TIMEOUT_S

    def connect(clock: Clock) -> SharedDirectory:
        return SharedDirectory(root, said, clock, timeout_s=timeout_s)

    with in_memory() as root, hooked(files):
        rng = rng_of("l2", seed, fault.is_sealed)
        kind = _Mortals if fault.kind == _KILL else World
        world = kind(rng, is_sealed=fault.is_sealed, connect=connect, weights=WEIGHTS)
        if isinstance(world, _Mortals):
            world.files = files
        files.arm(fault.nth, ERRORS.get(fault.kind, errno.EIO), lasting=fault.is_lasting)
        try:
            world.run(steps)
            calls = files.calls.total()
            files.disarm()
            files.release()
            took_s = world.settle()
            world.read_all()
            world.end()
        except BaseException:
            world.abandon()
            raise
        finally:
            files.disarm()
            files.release()
            files.join()
    tally.heal_s = max(tally.heal_s, took_s)
    tally.trips += sum(replica.tier.trips for replica in world.replicas)
    tally.l2_hits += sum(replica.l2_hits for replica in world.replicas)
    tally.invalidations += world.counts["invalidations"]
    return calls


def _faults(calls: list[int]) -> Iterator[Fault]:
    case = 0
    for is_sealed in (False, True):
        for nth in range(1, calls[is_sealed] + 1):
            for kind in (*ERRORS, _KILL):
                for is_lasting in {"hang": (False,), _KILL: (True,)}.get(kind, (False, True)):
                    yield Fault(case, nth, kind, is_lasting, is_sealed)
                    case += 1
