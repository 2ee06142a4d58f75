"""R4: the n-th system call fails, for every n, in every way; once, or from then on. Or a slot does, for good."""

import errno
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.core.types import PAGE_BYTES
from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.faults import PLACE_KINDS, SHORT, BadPlace, BadPlaces
from proofs.drive import Drive
from proofs.engine import Broken

CLAIM = "whichever call fails: every request is right, nothing leaks, and the tier is back within 30 s"
ERRORS = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE, "short": SHORT}
_MAX_HEAL_S = 30.0
_SLOTS = 10
"""Slots that every disk of the scenario has at least."""


@dataclass(frozen=True, slots=True)
class Options:
    """steps: of the scenario, which is run anew for each fault. every: only each so many-th call, for a quick look."""

    steps: int = 120
    every: int = 1
    seed: int = 0
    only: int | None = None


@dataclass(frozen=True, slots=True)
class _Fault:
    """One way in which one call fails, or one slot (PLACE_KINDS). case: its number."""

    case: int
    nth: int
    error: str
    is_lasting: bool
    is_sealed: bool

    def arm(self, files: BadPlaces) -> None:
        if self.error in ERRORS:
            files.arm(self.nth, ERRORS[self.error], lasting=self.is_lasting)
        else:  # the second page of the slot, or the first of one that has no more
            slot_bytes = PAGE_BYTES if self.is_sealed else 2 * PAGE_BYTES
            stop = (self.nth + 1) * slot_bytes
            files.places.append(BadPlace(self.error, stop - PAGE_BYTES, stop))

    def __str__(self) -> str:
        kind = "sealed" if self.is_sealed else "plain"
        if self.error not in ERRORS:
            return f"slot {self.nth} is bad ({self.error}), {kind}"
        return f"{self.error} {'from call' if self.is_lasting else 'at call'} {self.nth}, {kind}"


@dataclass(slots=True)
class _Tally:
    runs: int = 0
    refused: int = 0
    trips: int = 0
    set_aside: int = 0
    hits: int = 0
    disk_hits: int = 0
    heal_s: list[float] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)


def run(options: Options, progress: Progress) -> Proof:
    """The scenario once for every fault."""
    tally = _Tally()
    calls = [_calls(options, is_sealed) for is_sealed in (False, True)]
    faults = [fault for fault in _faults(calls) if options.only is None or fault.case == options.only]
    if options.only is None:
        faults = faults[:: options.every]
    fds = open_fds()
    for number, fault in enumerate(faults):
        try:
            _try(fault, options, tally)
        except (Broken, AssertionError) as error:
            tally.findings.add(fault.case, f"{fault}: {error}")
        tally.runs += 1
        progress(number, len(faults))
    leaked = len(open_fds()) - len(fds)
    figures = {
        "calls_plain": calls[0],
        "calls_sealed": calls[1],
        "errors": ", ".join(ERRORS),
        "bad_places": sum(fault.error not in ERRORS for fault in faults),
        "bad_slots_set_aside": tally.set_aside,
        "runs": tally.runs,
        "openings_refused": tally.refused,
        "trips": tally.trips,
        "hits": tally.hits,
        "disk_hits": tally.disk_hits,
        "failures": tally.findings.count,
        "leaked_descriptors": leaked,
        "healed_after_s_max": max(tally.heal_s, default=0.0),
    }
    passed = not tally.findings.count and leaked == 0 and tally.runs > 0
    return Proof("fault", CLAIM, figures, passed, tuple(tally.findings.kept))


def _faults(calls: list[int]) -> Iterator[_Fault]:
    case = 0
    for is_sealed in (False, True):
        for nth in range(1, calls[is_sealed] + 1):
            for error in ERRORS:
                for is_lasting in (False, True):
                    yield _Fault(case, nth, error, is_lasting, is_sealed)
                    case += 1
    for is_sealed in (False, True):
        for nth in range(_SLOTS):
            for kind in PLACE_KINDS:
                yield _Fault(case, nth, kind, True, is_sealed)
                case += 1


def _calls(options: Options, is_sealed: bool) -> int:
    """How many system calls the scenario makes when none fails."""
    with in_memory() as path:
        drive = _drive(path, options, is_sealed, lambda files: None)
        drive.run(options.steps)
        calls = sum(drive.world.files.calls.values())
        drive.end()
    return calls


def _drive(path: Path, options: Options, is_sealed: bool, arm: Callable[[BadPlaces], None]) -> Drive:
    """The scenario; sealed chunks are compressed, too. Raises: DirectoryError if its first opening fails."""
    return Drive(path, rng_of("fault", options.seed, is_sealed), is_sealed=is_sealed, is_packed=is_sealed, arm=arm)


def _try(fault: _Fault, options: Options, tally: _Tally) -> None:
    """Raises: Broken."""
    before = open_fds()
    with in_memory() as path:
        try:
            drive = _drive(path, options, fault.is_sealed, fault.arm)
        except DirectoryError:  # a server that starts on such a disk says so, and does not start
            tally.refused += 1
            if open_fds() != before:
                raise Broken("a refused opening left descriptors open") from None
            return
        try:
            drive.run(options.steps)
            tally.heal_s.append(drive.heal(_MAX_HEAL_S))
            tally.trips += drive.world.tier.trips
            tally.set_aside += drive.world.tier.usage().bad_slots
            drive.end()
            tally.hits += drive.engine.counts.hits
            tally.disk_hits += drive.engine.counts.disk_hits
        except BaseException:
            drive.abandon()
            raise
    if leaked := open_fds() - before:
        raise Broken(f"{len(leaked)} descriptors are left open")


def open_fds() -> set[str]:
    """This process's descriptors, but for the one that reads the list."""
    return {name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")}
