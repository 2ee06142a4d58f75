"""What a sick L2 costs requests: time to first token over a link that is slow, hung or broken, against no cache.

usage: python -m benchmarks.slow_l2 [--requests 100] [--output benchmarks/results/proofs/slow-l2.json]

Two engines over one model, each in a process of its own: hotspan with RAM for one text only and everything else in a
Redis server behind a link of ours (kit/link.py), and the same engine without hotspan. They are asked in
turns, a text each that lies in the L2; the engine's own prefix cache is emptied before each request. Once the L2 is
filled, the link has its trouble; then it is well again, until the tier is back.
Bound: p50 and p99 at most 1.05 x those without a cache + 50 ms.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.beside_alone import CHUNK_GIB, HEALS_S, TEXTS, TOKENS, Alone, compare, fill, recovery
from benchmarks.harness import arguments
from hotspan.config.settings import L2Settings
from hotspan.demo.model import make_demo_model
from kit.engine import rig
from kit.link import Trouble, TroubledLink
from kit.proof import Proof, write_proof
from kit.redis_server import RedisServer

TROUBLES = {
    "healthy": Trouble(),
    "10 MB/s": Trouble(bytes_per_s=10e6),
    "200 ms": Trouble(delay_s=0.1),  # each way
    "10 MB/s, 200 ms": Trouble(delay_s=0.1, bytes_per_s=10e6),
    "hung": Trouble(is_hung=True),
    "refusing": Trouble(is_refusing=True),
    "breaking off": Trouble(breaks_at=1 << 20),
    "garbling": Trouble(is_garbling=True),
}


def main() -> int:
    options = arguments(__doc__, requests=100)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=".") as scratch, contextlib.ExitStack() as stack:
        server = RedisServer(Path(scratch).resolve())
        server.start()
        stack.callback(server.stop)
        link = stack.enter_context(TroubledLink("127.0.0.1", server.port))
        model = make_demo_model(Path(scratch) / "tiny", "tiny").path
        alone = stack.enter_context(contextlib.closing(Alone(model)))
        l2 = L2Settings(f"redis://127.0.0.1:{link.port}", {"timeout_s": "1"})
        cache = {"patience_s": None, "drain_s": 1.0, "l2": l2}
        engine = stack.enter_context(rig(model, ram_gib=16 * CHUNK_GIB, cache=cache))
        texts = fill(engine, alone)
        for name, trouble in TROUBLES.items():
            link.trouble = trouble
            found[name] = compare(engine, alone, texts, options.requests)
            link.trouble = Trouble()
            found[name] |= recovery(engine, texts[0])
            print(f"{name:16} {json.dumps(found[name])}", flush=True)
    passed = all(each["is_met"] and each["read_after_s"] <= HEALS_S for each in found.values())
    proof = Proof(
        "slow-l2",
        "over an L2 that is slow, hung or broken p50 and p99 TTFT are at most 1.05 x those without a cache + 50 ms",
        found,
        passed,
    )
    if options.output is not None:
        facts = {"requests": options.requests, "texts": TEXTS, "tokens": TOKENS}
        write_proof(options.output, proof, facts, f"python -m benchmarks.slow_l2 --requests {options.requests}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
