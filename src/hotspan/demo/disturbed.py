"""Whether something else took the machine while a mode was played: rounds that are the same work in every mode."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from hotspan.bench.compare import TIMES
from hotspan.bench.figures import paired_ttft
from hotspan.bench.records import BenchResult, RoundName

SLOWER: Final = 1.25
"""Times of the fastest mode's cold round; storing costs a few percent."""

_LEAST_S: Final = 0.5
_LEAST_TTFT_S: Final = 0.03
_SHORT: Final = 1.6
"""The same of the pre-warm-up, which takes a second or two: the only cold work of a restarted server."""


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A mode that took longer than others for the same work."""

    mode: str
    why: str


def disturbances(results: Mapping[str, BenchResult], titles: Mapping[str, str]) -> list[Disturbance]:
    """The modes of one repetition that were disturbed.

    Each mode with a cold round is compared with the fastest of them; one without is compared by its pre-warm-up. RAM
    that is slower than disk was disturbed, too, as it does less of the same.
    """
    found = _slower(results, RoundName.WARM_UP, SLOWER)
    short = {name: result for name, result in results.items() if result.round(RoundName.WARM_UP) is None}
    found |= {name: why for name, why in _slower(results, RoundName.PRE_WARM_UP, _SHORT).items() if name in short}
    if "ram" in results and "disk" in results and "ram" not in found:
        ratio = paired_ttft((results["ram"],), (results["disk"],))
        extra_s = _mean_ttft(results["ram"]) - _mean_ttft(results["disk"])
        if ratio and ratio.low is not None and ratio.low > 1 and extra_s > _LEAST_TTFT_S:
            found["ram"] = (
                f"its time to first token was {ratio.mean:.2f}{TIMES} that from disk ({ratio.low:.2f} or more)"
            )
    return [Disturbance(name, f"{titles[name]}: {why}") for name, why in found.items()]


def _mean_ttft(result: BenchResult) -> float:
    found = result.query.summary.ttft_s
    return found.mean if found else 0.0


def _slower(results: Mapping[str, BenchResult], name: RoundName, factor: float) -> dict[str, str]:
    rounds = {mode: result.round(name) for mode, result in results.items()}
    took = {mode: played.summary.elapsed_s for mode, played in rounds.items() if played}
    best = min(took.values(), default=0.0)
    return {
        mode: f"its {name.value} round took {elapsed_s:.1f} s, the same work {best:.1f} s in the fastest mode"
        for mode, elapsed_s in took.items()
        if elapsed_s > factor * best and elapsed_s - best > _LEAST_S
    }
