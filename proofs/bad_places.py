"""R14: a day, simulated, on a disk of which slots are bad at random, in all ways: it serves the others."""

from dataclasses import dataclass
from pathlib import Path

from hotspan.core.types import Tier
from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.faults import PLACE_KINDS
from proofs.drive import Drive
from proofs.engine import Broken, Counts

CLAIM = "a disk with bad slots at random serves the room of the others, every request is right, and few pauses are made"
_STEPS_PER_HOUR = 1200
_TENANTS, _TEXTS = 6, 20
_MIN_CHURN_PER_DAY = 10.0
"""Of the disk's capacity, as in the soak."""


@dataclass(frozen=True, slots=True)
class Options:
    """hours: that are simulated on each disk. slots: of it. seeds: disks, plain and sealed in turns."""

    hours: float = 24.0
    slots: int = 200
    bad_part: float = 0.05
    seeds: int = 4
    seed: int = 0
    only: int | None = None


@dataclass(slots=True)
class _Day:
    """What came of one disk's time. written: bytes to the disk. trips: pauses of the tier."""

    written: int = 0
    trips: int = 0

    def live(self, drive: Drive, options: Options) -> None:
        """So many hours, a step each few seconds. Raises: Broken."""
        world = drive.world
        began_s = world.clock.monotonic()
        for step in range(int(options.hours * _STEPS_PER_HOUR)):
            tier = world.tier
            drive.run(1)
            self.written += world.cache.take_stats().store_bytes[Tier.DISK]
            self.trips += tier.trips if world.tier is not tier else 0
            ahead_s = began_s + (step + 1) * 3600 / _STEPS_PER_HOUR - world.clock.monotonic()
            if ahead_s > 0 and step % 20 == 0:
                drive.idle(min(ahead_s, 60.0))
        self.trips += world.tier.trips
        drive.heal(30.0)


def _drive(options: Options, case: int, path: Path) -> Drive:
    return Drive(
        *(path, rng_of("bad_places", options.seed, case)),
        is_sealed=case % 2 == 1,
        is_packed=case // 2 % 2 == 1,
        tenants=_TENANTS,
        each=_TEXTS,
        bad_part=options.bad_part,
        disk_slots=options.slots,
    )


def run(options: Options, progress: Progress) -> Proof:
    """Disk after disk, each a case; each is opened anew now and then, and finds the bad slots still set aside.

    The tier may pause once for each bad slot. There are as many tenants and texts as in the soak.
    """
    findings, totals = Findings(), dict.fromkeys(Counts.__slots__, 0)
    rooms: list[float] = []
    churns: list[float] = []
    sums = dict.fromkeys(("hours", "crashes", "bad", "set_aside", "trips", *PLACE_KINDS), 0.0)
    for case in range(options.seeds) if options.only is None else [options.only]:
        with in_memory() as path:
            drive, day = _drive(options, case, path), _Day()
            world, began_s, bad = drive.world, drive.world.clock.monotonic(), len(drive.world.places)
            try:
                day.live(drive, options)
                usage = world.tier.usage()
                churns.append(day.written / (options.slots * world.options.disk.payload_bytes))
                rooms.append((world.options.disk.slots - usage.bad_slots) / world.options.disk.slots)
                sums["hours"] += (world.clock.monotonic() - began_s) / 3600
                sums["set_aside"] += usage.bad_slots
                drive.end()
            except (Broken, AssertionError) as error:
                findings.add(case, f"step {drive.steps}: {error}")
                drive.abandon()
        sums["bad"] += bad
        sums["trips"] += day.trips
        sums["crashes"] += drive.crashes
        for kind in PLACE_KINDS:
            sums[kind] += world.met[kind]
        for name in totals:
            totals[name] += getattr(drive.engine.counts, name)
        progress(case + 1, options.seeds)
    figures = {
        **{f"calls_at_{kind}_places" if kind in PLACE_KINDS else kind: value for kind, value in sums.items()},
        "room_min": min(rooms, default=0.0),
        "churn_over_capacity_min": min(churns, default=0.0),
        **totals,
        "failures": findings.count,
    }
    passed = not findings.count and min(rooms, default=0.0) >= 1 - options.bad_part and totals["disk_hits"] > 0
    passed = passed and sums["set_aside"] > 0 and sums["trips"] <= sums["bad"]
    passed = passed and min(churns, default=0.0) >= _MIN_CHURN_PER_DAY * options.hours / 24
    return Proof("bad_places", CLAIM, figures, passed, tuple(findings.kept))
