"""R2: power losses. Whatever of the unsynced writes is lost, reordered or torn: no wrong byte, nothing resurrected."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from hotspan.core.errors import DirectoryError
from hotspan.testing.clock import SimulatedClock
from kit.places import in_memory
from kit.proof import Findings, Progress, Proof, rng_of
from kit.simulated.faults import BadPlaces
from kit.simulated.inline import InlineQueues
from kit.simulated.keys import FixedKeys
from kit.simulated.power import PowerLoss, power_loss
from proofs.power_run import READER, RecordedRun, Stored, loaded, open_tier

CLAIM = "after a power loss every chunk found has its own bytes, and nothing invalidated is back"


@dataclass(frozen=True, slots=True)
class Options:
    """images: power losses, `images_per_run` in each recorded run of `steps` calls; every other run is sealed."""

    images: int = 1000
    images_per_run: int = 100
    steps: int = 150
    seed: int = 0
    only: int | None = None


@dataclass(slots=True)
class _Tally:
    images: int = 0
    whole: int = 0
    faulty: int = 0
    wrong: int = 0
    resurrected: int = 0
    failed_opens: int = 0
    acknowledged: int = 0
    evictions: int = 0
    reopened: int = 0
    met: int = 0
    findings: Findings = field(default_factory=Findings)


def run(options: Options, progress: Progress) -> Proof:
    """Recorded runs, and a power loss at random moments of each."""
    tally = _Tally()
    runs = -(-options.images // options.images_per_run)
    started = time.monotonic()
    with in_memory() as path:
        for case in range(runs) if options.only is None else [options.only]:
            left = options.images - case * options.images_per_run if options.only is None else options.images_per_run
            _try(path / f"run-{case}", path / "image", case, min(left, options.images_per_run), options, tally)
            progress(tally.images, options.images)
    figures = {
        "images": tally.images,
        "runs": runs if options.only is None else 1,
        "chunks_loaded": tally.whole,
        "chunks_lost_to_faults": tally.faulty,
        "invalidations_acknowledged": tally.acknowledged,
        "evictions": tally.evictions,
        "reopenings": tally.reopened,
        "calls_at_bad_places": tally.met,
        "failed_opens": tally.failed_opens,
        "wrong_bytes": tally.wrong,
        "resurrected": tally.resurrected,
        "ms_per_image": (time.monotonic() - started) / max(1, tally.images) * 1e3,
    }
    passed = not tally.findings.count and tally.whole > tally.images / 2 and tally.acknowledged > 0
    return Proof("power", CLAIM, figures, passed, tuple(tally.findings.kept))


def _try(path: Path, image_path: Path, case: int, images: int, options: Options, tally: _Tally) -> None:
    rng = rng_of("power", options.seed, case)
    recorded = RecordedRun(path, rng, is_sealed=case % 2 == 1, is_packed=case // 2 % 2 == 1, has_bad=case % 3 == 2)
    recording = recorded.run(options.steps)
    recorded.close()
    tally.acknowledged += recorded.acknowledged
    tally.evictions += recorded.evictions
    tally.reopened += recorded.reopened
    tally.met += sum(recorded.files.met.values())
    for number in range(images):
        image = power_loss(recording, rng.randrange(recording.moments), rng)
        tally.images += 1
        try:
            _look(image_path, image, recorded, case, number, tally)
        except (DirectoryError, AssertionError) as error:
            tally.failed_opens += isinstance(error, DirectoryError)
            tally.findings.add(case, f"image {number}, cut {image.cut}: {error}")


def _look(path: Path, image: PowerLoss, recorded: RecordedRun, case: int, number: int, tally: _Tally) -> None:
    """Open what the power loss left, and load all of it. Raises: DirectoryError, AssertionError."""
    image.restore(path)
    dead: set[Stored] = set().union(*image.marks)
    queues = InlineQueues()
    keys = FixedKeys(READER) if recorded.is_sealed else None
    clock = SimulatedClock()
    files = BadPlaces(list(recorded.places), wait=clock.advance)
    tier = open_tier(path, queues, keys, files, clock, is_packed=recorded.is_packed)
    try:
        for key, data in loaded(tier, queues):
            if data is None:
                tally.faulty += 1
                continue
            tally.whole += 1
            stored = recorded.contents.get(data)
            if stored is None or stored[0] != key:
                tally.wrong += 1
                tally.findings.add(case, f"image {number}, cut {image.cut}: wrong bytes")
            elif stored in dead:
                tally.resurrected += 1
                tally.findings.add(case, f"image {number}, cut {image.cut}: what was invalidated is back")
        tier.check()
    finally:
        tier.close(5.0)
        tally.met += sum(files.met.values())
