"""The simulator's caches beside the engine's own scheduler and pool with hotspan's RAM tier: the same requests."""

import random
from pathlib import Path

import pytest

from hotspan.core.trace import Request, Trace
from hotspan.core.types import GIB
from hotspan.simulate.costs import Costs, Setup, Sizes
from hotspan.simulate.simulation import Simulation
from kit.engine import CHUNK
from tests.engine.harness.core import BLOCK, Core, core

pytestmark = pytest.mark.engine

REQUESTS, DOCUMENTS, POOL = 120, 60, 32  # POOL in chunks


def documents(seed: int) -> list[tuple[int, ...]]:
    """The chunks of each request: of a document, and of a few documents more often than of the others."""
    rng = random.Random(seed)
    chunks = [rng.randrange(4, 9) for _ in range(DOCUMENTS)]
    weights = [1 / (place + 1) ** 0.8 for place in range(DOCUMENTS)]
    asked = rng.choices(range(DOCUMENTS), weights, k=REQUESTS)
    return [tuple(document * 100 + n for n in range(chunks[document])) for document in asked]


def found_by(engine: Core, requests: list[tuple[int, ...]], questions: list[int]) -> list[int]:
    """Tokens of each request that the engine's pool or the tier had; one request after the other."""
    found = []
    for number, (keys, tokens) in enumerate(zip(requests, questions, strict=True)):
        text = [token for key in keys for token in engine.text(key, CHUNK)]
        found.append(engine.ask(text + engine.text(10**6 + number, tokens)))
        engine.settle()
    return found


@pytest.mark.parametrize(("share", "longest"), [(0.2, 40), (0.3, 40), (0.3, CHUNK - 1), (0.4, CHUNK - 1)])
def test_it_finds_what_the_engine_finds(share: float, longest: int, tiny_model: Path) -> None:
    """Each request's hits are the engine's, with room in RAM for a share of all documents' chunks."""
    requests, rng = documents(1), random.Random(2)
    questions = [rng.randint(min(40, longest), longest) for _ in requests]
    slots = int(share * len({key for keys in requests for key in keys}))
    with core(tiny_model, num_gpu_blocks_override=POOL * CHUNK // BLOCK + 1) as engine:
        slab = engine.cache.ram.slab
        slot_bytes = slab.bytes // slab.slots
    ram_gib = (slots + 0.01) * slot_bytes / GIB
    with core(tiny_model, ram_gib=ram_gib, num_gpu_blocks_override=POOL * CHUNK // BLOCK + 1) as engine:
        assert engine.cache.ram.slab.slots == slots
        found = found_by(engine, requests, questions)
    lengths = [len(keys) * CHUNK + question for keys, question in zip(requests, questions, strict=True)]
    rows = [Request(60.0 * n, tokens, 1, keys) for n, (tokens, keys) in enumerate(zip(lengths, requests, strict=True))]
    costs = Costs(kv_bytes=slot_bytes / CHUNK)
    setup = Setup(1, costs, Sizes(gpu_tokens=POOL * CHUNK, ram_gib=ram_gib), None, CHUNK, BLOCK)
    outcome = Simulation(setup, "roundrobin").run(Trace.of("documents", rows, CHUNK))
    assert outcome.hit_rate == sum(found) / sum(row.tokens for row in rows)
