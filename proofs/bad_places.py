"""R14: a day, simulated, on a disk of which slots are bad at random, in all ways: it serves the others."""

from dataclasses import dataclass

from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.faults import PLACE_KINDS
from proofs.drive import Drive
from proofs.engine import Broken, Counts

CLAIM = "a disk with bad slots at random serves the room of the others, every request is right, and few pauses are made"
_STEPS_PER_HOUR = 1200
_TENANTS, _TEXTS = 6, 20


@dataclass(frozen=True, slots=True)
class Options:
    """hours: that are simulated on each disk. slots: of it. seeds: disks, plain and sealed in turns."""

    hours: float = 24.0
    slots: int = 200
    bad_part: float = 0.05
    seeds: int = 4
    seed: int = 0
    only: int | None = None


def run(options: Options, progress: Progress) -> Proof:
    """Disk after disk, each a case; each is opened anew now and then, and finds the bad slots still set aside.

    The tier may pause once for each bad slot.
    """
    findings, totals = Findings(), dict.fromkeys(Counts.__slots__, 0)
    rooms: list[float] = []
    sums = dict.fromkeys(("hours", "crashes", "bad", "set_aside", "trips", *PLACE_KINDS), 0.0)
    for case in range(options.seeds) if options.only is None else [options.only]:
        with in_memory() as path:
            rng = rng_of("bad_places", options.seed, case)
            drive = Drive(
                *(path, rng),
                is_sealed=case % 2 == 1,
                is_packed=case // 2 % 2 == 1,
                tenants=_TENANTS,
                each=_TEXTS,
                bad_part=options.bad_part,
                disk_slots=options.slots,
            )
            world, began_s, trips = drive.world, drive.world.clock.monotonic(), 0
            bad = len(world.places)
            try:
                steps = int(options.hours * _STEPS_PER_HOUR)
                for step in range(steps):
                    tier = world.tier
                    drive.run(1)
                    trips += tier.trips if world.tier is not tier else 0
                    ahead_s = began_s + (step + 1) * 3600 / _STEPS_PER_HOUR - world.clock.monotonic()
                    if ahead_s > 0 and step % 20 == 0:
                        drive.idle(min(ahead_s, 60.0))
                trips += world.tier.trips
                drive.heal(30.0)
                usage = world.tier.usage()
                rooms.append((world.options.slots - usage.bad_slots) / world.options.slots)
                sums["hours"] += (world.clock.monotonic() - began_s) / 3600
                sums["set_aside"] += usage.bad_slots
                drive.end()
            except (Broken, AssertionError) as error:
                findings.add(case, f"step {drive.steps}: {error}")
                drive.abandon()
        sums["bad"] += bad
        sums["trips"] += trips
        sums["crashes"] += drive.crashes
        for kind in PLACE_KINDS:
            sums[kind] += world.met[kind]
        for name in totals:
            totals[name] += getattr(drive.engine.counts, name)
        progress(case + 1, options.seeds)
    figures = {
        **{f"calls_at_{kind}_places" if kind in PLACE_KINDS else kind: value for kind, value in sums.items()},
        "room_min": min(rooms, default=0.0),
        **totals,
        "failures": findings.count,
    }
    passed = not findings.count and min(rooms, default=0.0) >= 1 - options.bad_part and totals["disk_hits"] > 0
    passed = passed and sums["set_aside"] > 0 and sums["trips"] <= sums["bad"]
    return Proof("bad_places", CLAIM, figures, passed, tuple(findings.kept))
