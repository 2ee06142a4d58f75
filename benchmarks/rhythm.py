"""Next turns of sessions that are prefetched by their rhythm: what that gains, and where it pauses.

usage: python -m benchmarks.rhythm [--rounds 6] [--once 40] [--output FILE]

Turns: one engine; a Llama shape with random weights in bfloat16, 32 KiB of KV per token, a disk, and RAM for 12 texts
of 1,856 tokens. 16 sessions take turns, each 15.5 to 16.5 s after its last one. When the gaps are learnt, every second
turn of a session is announced and the others are not, so that both are measured at the same time. The engine's own
prefix cache is emptied before each turn, and every block is digested when it is stored and when it is loaded.
Once: then sessions of a single turn come, one a second. Their next turns, which never come, are predicted by the gaps
of the others, until that pauses.
Gaps: the estimator alone, on a simulated clock: 200 sessions of 20 turns, by how their gaps are distributed.
"""

import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.harness import arguments
from hotspan.bench.machine import write_results
from hotspan.cache.rhythm import OWN_GAPS, Rhythm, SessionId, Turn
from hotspan.cache.stats import CacheStats
from hotspan.core.types import GIB, MIB, Chunk, ChunkKey
from hotspan.demo.model import make_demo_model
from hotspan.testing.clock import SimulatedClock
from kit.engine import Rig, rig
from kit.environment import prepare_environment
from kit.families.make import make_family
from kit.families.table import SIZES, Family

SHAPE = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
CHUNKS, TOKENS = 7, 7 * 256 + 64
SESSIONS, GAP_S, JITTER_S, ONCE_EVERY_S, PACE_S = 16, 16.0, 0.5, 1.0, 0.002
RAM_GIB, DISK_GIB = 12 * CHUNKS * 8 * MIB / GIB, 5.0

GAPS: dict[str, Callable[[random.Random], float]] = {
    "constant": lambda rng: 20.0,
    "uniform_10_percent": lambda rng: 20.0 * rng.uniform(0.9, 1.1),
    "uniform_25_percent": lambda rng: 20.0 * rng.uniform(0.75, 1.25),
    "uniform_50_percent": lambda rng: 20.0 * rng.uniform(0.5, 1.5),
    "lognormal_0.5": lambda rng: 20.0 * rng.lognormvariate(0.0, 0.5),
    "lognormal_1.0": lambda rng: 20.0 * rng.lognormvariate(0.0, 1.0),
}


# -- the engine --------------------------------------------------------------------------------------------------------


class Turns:
    """Sessions of one engine.

    announces: whether the text with this first chunk may be announced now.
    """

    def __init__(self, engine: Rig) -> None:
        self.engine = engine
        self.announces: Callable[[ChunkKey], bool] = lambda first: True
        rhythm = engine.manager.rhythm
        due = rhythm.due

        def allowed() -> Iterator[Turn]:
            return (turn for turn in due() if self.announces(turn.chunks[0].key))

        rhythm.due = allowed

    def wait(self, until_s: float) -> None:
        """The engine is idle; its core looks at prefetches every 2 ms, as in a server."""
        while time.monotonic() < until_s:
            self.engine.connector.administrator.run_waiting()
            time.sleep(PACE_S)

    def take(self, text: list[int], session: str) -> float:
        """One turn; seconds to its first token."""
        self.engine.forget_gpu()
        began_s = time.perf_counter()
        self.engine.ask(text, 1, session=session)
        taken_s = time.perf_counter() - began_s
        self.engine.settle()
        return taken_s


def regular(turns: Turns, rounds: int, rng: random.Random) -> dict[str, list[float]]:
    """Seconds to the first token of turns that were announced and that were not."""
    texts = [turns.engine.text(number, TOKENS) for number in range(SESSIONS)]
    taken = [0] * SESSIONS
    numbers: dict[ChunkKey, int] = {}
    found: dict[str, list[float]] = {"announced": [], "not_announced": []}

    def is_announced(number: int) -> bool:
        return taken[number] > OWN_GAPS and (taken[number] + number) % 2 == 0

    turns.announces = lambda first: is_announced(numbers[first])
    due_s = [time.monotonic() + number * GAP_S / SESSIONS for number in range(SESSIONS)]
    for _ in range(SESSIONS * (OWN_GAPS + 1 + rounds)):
        number = min(range(SESSIONS), key=due_s.__getitem__)
        turns.wait(due_s[number])
        known = set(turns.engine.cache.ram.entries)
        taken_s = turns.take(texts[number], f"session-{number}")
        if not taken[number]:
            fresh = (entry.chunk for key, entry in turns.engine.cache.ram.entries.items() if key not in known)
            numbers[next(chunk.key for chunk in fresh if not chunk.index)] = number
        if taken[number] > OWN_GAPS:
            found["announced" if is_announced(number) else "not_announced"].append(taken_s)
        taken[number] += 1
        due_s[number] = time.monotonic() + GAP_S + rng.uniform(-JITTER_S, JITTER_S)
    return found


def once(turns: Turns, sessions: int) -> None:
    """Sessions of one turn each, until the last of them could have been announced."""
    turns.announces = lambda first: True
    for number in range(sessions):
        until_s = time.monotonic() + ONCE_EVERY_S
        turns.take(turns.engine.text(1000 + number, TOKENS), f"once-{number}")
        turns.wait(until_s)
    turns.wait(time.monotonic() + GAP_S + 5.0)


# -- the estimator -----------------------------------------------------------------------------------------------------


def predicted(draw: Callable[[random.Random], float], sessions: int = 200, turns: int = 20) -> dict[str, float]:
    """What becomes of turns whose gaps are drawn like this.

    announced: the share of turns. used: the share of these that came in time. held_s: for each that did, all together.
    """
    rng, clock, stats = random.Random(1), SimulatedClock(), CacheStats()
    rhythm = Rhythm(clock, stats)
    starts = [rng.uniform(0.0, 20.0 * turns) for _ in range(sessions)]
    arrivals = sorted(
        (at_s, number)
        for number, start_s in enumerate(starts)
        for at_s in _sums(start_s, [draw(rng) for _ in range(turns - 1)])
    )
    held: dict[int, tuple[Turn, float]] = {}  # by session
    began_s, announced, used, held_s = clock.monotonic(), 0, 0, 0.0

    def step(until_s: float) -> None:
        """Note what ends, and announce what is due, by then."""
        nonlocal announced, held_s
        while True:
            ends = {number: at_s + turn.hold_s for number, (turn, at_s) in held.items()}
            next_s = min(chain(ends.values(), [rhythm.next_s or float("inf")]))
            if next_s > until_s:
                break
            clock.advance(max(0.0, next_s - clock.monotonic()))
            for number in [number for number, at_s in ends.items() if at_s <= clock.monotonic()]:
                turn, _ = held.pop(number)
                held_s += turn.hold_s
                rhythm.note(turn.source, 0, 1)
            for turn in rhythm.due():
                announced += 1
                held[turn.chunks[0].index] = turn, clock.monotonic()
        clock.advance(max(0.0, until_s - clock.monotonic()))

    for at_s, number in arrivals:
        step(began_s + at_s)
        if (now := held.pop(number, None)) is not None:
            used += 1
            held_s += clock.monotonic() - now[1]
            rhythm.note(now[0].source, 1, 0)
        rhythm.arrive(SessionId(1, number))
        rhythm.end(SessionId(1, number), [Chunk(ChunkKey(bytes(32)), None, number)])
    step(clock.monotonic() + 100.0)
    return {
        "announced": announced / len(arrivals),
        "used": used / announced if announced else 0.0,
        "held_s": held_s / used if used else 0.0,
        "pauses": stats.turns["paused"],
    }


def _sums(start_s: float, gaps_s: list[float]) -> Iterator[float]:
    yield start_s
    for gap_s in gaps_s:
        start_s += gap_s
        yield start_s


def main() -> int:
    options = arguments(__doc__, rounds=6, once=40)
    prepare_environment()
    figures: dict[str, Any] = {"gaps": {name: predicted(draw) for name, draw in GAPS.items()}}
    with tempfile.TemporaryDirectory(dir=".") as scratch:
        tiny = make_demo_model(Path(scratch) / "tiny", "tiny").path
        family = Family(name="Llama", config="LlamaConfig", fields={**SIZES, **SHAPE})
        model = make_family(family, Path(scratch) / "model", tiny)
        disk, cache = Path(scratch).resolve() / "kv", {"prefetch_sessions": True}
        with rig(model, ram_gib=RAM_GIB, disk=disk, disk_gib=DISK_GIB, dtype="bfloat16", cache=cache) as engine:
            turns, counts = Turns(engine), engine.cache.stats
            engine.manager.get_stats = lambda: None  # the counts stay here
            seconds = regular(turns, options.rounds, random.Random(1))
            figures |= {f"ttft_{way}_s": statistics.median(each) for way, each in seconds.items()}
            figures["turns"] = {way: len(each) for way, each in seconds.items()}
            figures["announced_to_not"] = figures["ttft_announced_s"] / figures["ttft_not_announced_s"]
            figures["regular"] = dict(counts.turns) | {"chunks": dict(counts.prefetches)}
            counts.turns.clear()
            counts.prefetches.clear()
            once(turns, options.once)
            figures["once"] = dict(counts.turns) | {"sessions": options.once, "chunks": dict(counts.prefetches)}
            figures |= {"blocks_loaded": engine.digests.loaded, "blocks_wrong": engine.digests.wrong}
    print(figures)
    if options.output is not None:
        facts = {"sessions": SESSIONS, "tokens": TOKENS, "gap_s": GAP_S, "jitter_s": JITTER_S}
        command = f"python -m benchmarks.rhythm --rounds {options.rounds} --once {options.once}"
        write_results(options.output, "rhythm", command=command, settings=facts, figures=figures)
    return 1 if figures["blocks_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
