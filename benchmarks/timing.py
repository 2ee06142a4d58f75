"""Can a tenant tell by the time to first token what another tenant has asked? (arXiv 2409.20002, 2411.18191)

usage: python -m benchmarks.timing [--probes 10000] [--output benchmarks/results/timing.json]

Tenant A asks a text, tenant B a moment later: the same one, or one that nobody asked before; in turn at random. The
classifier is B's time to first token itself: the area under its ROC curve is 0.5 where it says nothing, and 1 where it
says all. Once with tenants isolated (the default), once with sharing on.
"""

import hashlib
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from kit.engine import Rig
from kit.environment import prepare_environment

prepare_environment()

from hotspan.core.directives import Directives  # noqa: E402
from hotspan.demo.model import make_demo_model  # noqa: E402
from kit.engine import rig  # noqa: E402
from kit.proof import Proof, write_proof  # noqa: E402

TOKENS = 300
BOUND = 0.55


def area_under_roc(hits: list[float], misses: list[float]) -> float:
    """Chance that a hit was faster than a miss, ties counted half (the Mann-Whitney statistic)."""
    ranked = sorted([(value, 0) for value in hits] + [(value, 1) for value in misses])
    ranks, at = 0.0, 0
    while at < len(ranked):
        end = at
        while end < len(ranked) and ranked[end][0] == ranked[at][0]:
            end += 1
        ranks += sum(kind == 1 for _, kind in ranked[at:end]) * ((at + 1 + end) / 2)
        at = end
    return (ranks - len(misses) * (len(misses) + 1) / 2) / (len(hits) * len(misses))


class Prober:
    """Two tenants of one engine."""

    def __init__(self, engine: Rig, *, is_isolated: bool) -> None:
        self._engine = engine
        self._is_isolated = is_isolated
        self._rng = random.Random(1)
        self._vocabulary = int(engine.llm.llm_engine.model_config.get_vocab_size())

    def text(self) -> list[int]:
        """Tokens that nobody has seen."""
        return [self._rng.randrange(20, self._vocabulary) for _ in range(TOKENS)]

    def ask(self, tenant: str, text: list[int]) -> float:
        """Seconds to the first token, as the tenant's client sees them."""
        salt = hashlib.sha256(tenant.encode()).hexdigest() if self._is_isolated else None
        started = time.perf_counter()
        self._engine.ask(text, 1, salt=salt, hotspan=Directives(tenant=tenant).to_json())
        return time.perf_counter() - started

    def run(self, probes: int) -> dict[str, Any]:
        """The area under the curve over so many probes, and the medians."""
        hits: list[float] = []
        misses: list[float] = []
        for _ in range(probes):
            text, other = self.text(), self.text()
            is_hit = self._rng.random() < 0.5
            self.ask("a", text if is_hit else other)
            (hits if is_hit else misses).append(self.ask("b", text))
        return {
            "probes": probes,
            "auc": area_under_roc(hits, misses),
            "median_s_asked_before": statistics.median(hits),
            "median_s_new": statistics.median(misses),
        }


def measure(model: Path, probes: int, *, is_isolated: bool) -> dict[str, Any]:
    """One engine, and as many probes."""
    with rig(model, ram_gib=0.25, cache={"is_isolated": is_isolated, "patience_s": 0.05}) as engine:
        prober = Prober(engine, is_isolated=is_isolated)
        for _ in range(20):
            prober.ask("a", prober.text())
        return prober.run(probes)


def main() -> int:
    options = arguments(__doc__, probes=10_000)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_demo_model(Path(scratch) / "tiny", "tiny").path
        found = {
            "isolated": measure(model, options.probes, is_isolated=True),
            "shared": measure(model, max(200, options.probes // 10), is_isolated=False),
        }
    for name, figures in found.items():
        print(f"{name}: AUC {figures['auc']:.3f} over {figures['probes']} probes")
    passed = found["isolated"]["auc"] <= BOUND
    print(f"isolated at most {BOUND}: {'yes' if passed else 'NO'}")
    proof = Proof(
        "timing",
        f"a classifier of B's TTFT over A's texts reaches at most {BOUND} AUC while tenants are isolated",
        found,
        passed,
    )
    if options.output is not None:
        write_proof(
            options.output,
            proof,
            {"probes": options.probes, "tokens": TOKENS},
            f"python -m benchmarks.timing --probes {options.probes}",
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
