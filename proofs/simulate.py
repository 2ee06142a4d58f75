"""R7: everything at once in simulated time: readers, stores, forgetting, bad and slow disks and slots, power losses."""

from dataclasses import dataclass

from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from proofs.drive import Drive
from proofs.engine import Broken, Counts

CLAIM = "while disks fail and power goes, hits are right, nothing comes back, nobody waits for nothing, books agree"


@dataclass(frozen=True, slots=True)
class Options:
    """seeds: simulations of `steps` each, plain and sealed in turns."""

    seeds: int = 150
    steps: int = 400
    seed: int = 0
    only: int | None = None


def run(options: Options, progress: Progress) -> Proof:
    """Simulation after simulation, each a case."""
    findings, totals = Findings(), dict.fromkeys(Counts.__slots__, 0)
    sums = dict.fromkeys(("steps", "crashes", "losses", "faults", "found"), 0)
    done = bad = 0
    for case in range(options.seeds) if options.only is None else [options.only]:
        with in_memory() as path:
            rng = rng_of("simulate", options.seed, case)
            is_sealed, is_packed = case % 2 == 1, case // 2 % 2 == 1
            bad_part = 0.05 if case % 5 < 2 else 0.0
            drive = Drive(path, rng, is_sealed=is_sealed, is_packed=is_packed, is_troubled=True, bad_part=bad_part)
            try:
                drive.run(options.steps)
                drive.end()
            except (Broken, AssertionError) as error:
                findings.add(case, f"step {drive.steps}: {error}")
                drive.abandon()
        for name in sums:
            sums[name] += getattr(drive, name)
        bad += sum(drive.world.met.values())
        for name in totals:
            totals[name] += getattr(drive.engine.counts, name)
        done += 1
        progress(done, options.seeds)
    figures = {
        "simulations": done,
        "steps": sums["steps"],
        "crashes": sums["crashes"],
        "power_losses": sums["losses"],
        "faults_armed": sums["faults"],
        "calls_at_bad_places": bad,
        "chunks_found_after_crashes": sums["found"],
        **totals,
        "failures": findings.count,
    }
    enough = options.only is not None or (totals["disk_hits"] > 0 and sums["losses"] > 0 and bad > 0)
    return Proof("simulate", CLAIM, figures, not findings.count and enough, tuple(findings.kept))
