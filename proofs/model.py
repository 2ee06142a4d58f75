"""R6: cache and disk tier against a dict, under any order of calls, with crashes and reopenings."""

from dataclasses import dataclass

from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from proofs.drive import Drive
from proofs.engine import Broken, Counts

CLAIM = "whatever is called in whatever order, a hit is what a dict would have said, also after crashes"


@dataclass(frozen=True, slots=True)
class Options:
    """steps: in runs of `steps_per_run`, plain and sealed in turns."""

    steps: int = 10_000
    steps_per_run: int = 2_000
    seed: int = 0
    only: int | None = None


def run(options: Options, progress: Progress) -> Proof:
    """Run after run, each a case."""
    findings, totals = Findings(), dict.fromkeys(Counts.__slots__, 0)
    steps = crashes = found = bad = 0
    runs = -(-options.steps // options.steps_per_run)
    for case in range(runs) if options.only is None else [options.only]:
        with in_memory() as path:
            rng = rng_of("model", options.seed, case)
            bad_part = 0.1 if case % 5 in (1, 3) else 0.0
            drive = Drive(path, rng, is_sealed=case % 2 == 1, is_packed=case // 2 % 2 == 1, bad_part=bad_part)
            try:
                drive.run(options.steps_per_run)
                drive.end()
            except (Broken, AssertionError) as error:
                findings.add(case, f"step {drive.steps}: {error}")
                drive.abandon()
        steps, crashes, found = steps + drive.steps, crashes + drive.crashes, found + drive.found
        bad += sum(drive.world.met.values())
        for name in totals:
            totals[name] += getattr(drive.engine.counts, name)
        progress(steps, options.steps)
    figures = {"steps": steps, "crashes": crashes, "calls_at_bad_places": bad}
    figures |= {"chunks_found_after_crashes": found, **totals}
    figures["failures"] = findings.count
    passed = not findings.count and totals["disk_hits"] > 0 and (crashes > 0 or options.steps < 10_000)
    return Proof("model", CLAIM, figures, passed, tuple(findings.kept))
