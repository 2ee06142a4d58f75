"""What a tier of the same size finds of traces if its chunks are stored compressed: token hit rates, simulated.

usage: python -m benchmarks.compressed_hits [--seeds 3] [--scale 1.0] [--output FILE]

The tier holds a part of a trace's chunks, plain, and as many more of them as compression leaves room for: by the ratios
that were measured on the trained model's KV (benchmarks/results/compression.json). The policy is the product's. Traces
have the shape of public ones (hotspan/simulate/shapes.py). Nothing is timed: the figures follow from the seeds alone.
"""

import json
import statistics
import sys
from pathlib import Path

from benchmarks.eviction import CAPACITIES, SHAPES, alone, capacity_chunks, hit_rate
from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.demo.trained import NAME
from hotspan.tiers.eviction import LeafArc

DTYPES = ("bfloat16", "fp8")
MEASURED = Path(__file__).parent / "results" / "compression.json"


def ratios() -> dict[str, float]:
    """Plain over compressed bytes of the trained model's KV, by dtype, and 1 for none."""
    rows = json.loads(MEASURED.read_text())["codec"]
    trained = {row["dtype"]: round(row["hotspan"]["ratio"], 2) for row in rows if row["kv"] == NAME}
    return {"plain": 1.0} | {dtype: trained[dtype] for dtype in DTYPES}


def main() -> int:
    options = arguments(__doc__, seeds=3, scale=1.0)
    shown = ratios()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for shape in SHAPES:
        traces = [shape.draw(seed, scale=options.scale) for seed in range(1, options.seeds + 1)]
        found[shape.name] = {}
        print(f"{shape.name}: hit rate, mean of {options.seeds} traces")
        for name, ratio in shown.items():
            rates = {}
            for capacity in CAPACITIES:
                sizes = [round(capacity_chunks(trace, capacity) * ratio) for trace in traces]
                each = (hit_rate(LeafArc(size), size, alone(trace)) for size, trace in zip(sizes, traces, strict=True))
                rates[f"{capacity:.0%}"] = round(statistics.mean(each), 4)
            found[shape.name][name] = rates
            print(f"  {name:10} {ratio:.2f}  " + "  ".join(f"{size}: {rate:.3f}" for size, rate in rates.items()))
    if options.output is not None:
        write_results(
            options.output, "compressed-hits", command="python -m benchmarks.compressed_hits", ratios=shown, rates=found
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
