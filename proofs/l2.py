"""The faults of the disk tier's proofs with an L2 in the place of the disk: R4, R1, R3 and R10 over a shared directory.

Where each fault of a disk is shown for each kind of L2: docs/design/l2.md.
"""

from dataclasses import dataclass
from typing import Any

from kit.proof import Findings, Progress, Proof
from proofs.l2_fault import sweep
from proofs.l2_flip import change
from proofs.l2_soak import churn

CLAIM = "an L2 whose calls fail, hang or are a process's last, or whose bytes change, costs hits and nothing else"


@dataclass(frozen=True, slots=True)
class Options:
    """steps: of the scenario, which is run anew for each fault. every: only each so many-th fault, for a quick look.

    flips: of bits, half of them in sealed objects, as many in records, headers and payloads. hours: of the soak.
    """

    steps: int = 200
    every: int = 1
    flips: int = 20_000
    hours: float = 0.02
    seed: int = 0
    only: int | None = None


def run(options: Options, progress: Progress) -> Proof:
    """Every fault of calls; then changed bytes and a soak, unless only one case is run again."""
    findings = Findings()
    faults = sweep(options.steps, options.every, options.seed, options.only, findings, progress)
    figures: dict[str, Any] = {
        "calls_plain": faults.calls[0],
        "calls_sealed": faults.calls[1],
        **{f"runs_{kind}": count for kind, count in faults.runs.items()},
        "trips": faults.trips,
        "l2_hits": faults.l2_hits,
        "invalidations": faults.invalidations,
        "healed_after_s_max": faults.heal_s,
        "leaked_descriptors": faults.leaked_fds,
    }
    passed = sum(faults.runs.values()) > 0 and not faults.leaked_fds
    if options.only is None:
        changes = change(options.flips, options.seed, findings, progress)
        soak = churn(options.hours, options.seed, findings, progress)
        injected, detected = changes.injected.total(), changes.detected.total()
        figures |= {
            kind.replace(" ", "_"): f"{changes.detected[kind]} of {count}" for kind, count in changes.injected.items()
        }
        figures |= {
            "changes_injected": injected,
            "changes_detected": detected,
            "soak_churn_over_capacity": soak.churn,
            "soak_l2_hits": soak.l2_hits,
            "soak_invalidations": soak.invalidations,
            "soak_samples": soak.samples,
            "soak_most_objects_over_capacity": soak.over,
            "soak_files_left": soak.left,
            **{f"soak_drift_of_{name}": value for name, value in soak.drifts.items()},
        }
        passed = passed and injected == detected > 0 and soak.is_steady
    figures["failures"] = findings.count
    return Proof("l2", CLAIM, figures, passed and not findings.count, tuple(findings.kept))
