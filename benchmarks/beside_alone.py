"""An engine over a sick tier beside one without hotspan: time to first token of both, request by request."""

import multiprocessing
import time
from pathlib import Path
from typing import Any

from kit.environment import prepare_environment
from kit.measure import quantile

prepare_environment()

from kit.engine import Rig, engine_alone  # noqa: E402

TEXTS, TOKENS = 12, 3000
CHUNK_GIB = 1 / 1024  # of the tiny model in float32
BOUND_S = 0.050
HEALS_S = 30


class Alone:
    """The engine without hotspan, in a process of its own."""

    def __init__(self, model: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve_alone, args=(str(model), theirs), daemon=True)
        self._process.start()
        self._pipe.recv()

    def seconds(self, text: list[int]) -> float:
        """To the first token, measured over there."""
        self._pipe.send(text)
        return float(self._pipe.recv())

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(30)


def serve_alone(model: str, pipe: Any) -> None:
    """In the other process: a time to first token for each text, until None comes."""
    with engine_alone(Path(model)) as engine:
        pipe.send("ready")
        while (text := pipe.recv()) is not None:
            pipe.send(ask(engine, text))


def ask(engine: Any, text: list[int]) -> float:
    """Seconds to the first token, the engine's own prefix cache empty."""
    engine.forget_gpu()
    started = time.perf_counter()
    engine.ask(text, 1)
    return time.perf_counter() - started


def compare(engine: Rig, alone: Alone, texts: list[list[int]], requests: int) -> dict[str, Any]:
    """TTFT of both, in turns."""
    ours: list[float] = []
    theirs: list[float] = []
    for n in range(requests):
        text = texts[n % len(texts)]
        pair = [(ours, lambda text=text: ask(engine, text)), (theirs, lambda text=text: alone.seconds(text))]
        for into, seconds in pair if n % 2 else reversed(pair):
            into.append(seconds())
    return {
        "requests": requests,
        "p50_s": quantile(ours, 0.5),
        "p99_s": quantile(ours, 0.99),
        "no_cache_p50_s": quantile(theirs, 0.5),
        "no_cache_p99_s": quantile(theirs, 0.99),
        "bound_s": 1.05 * quantile(theirs, 0.99) + BOUND_S,
        "is_met": all(quantile(ours, q) <= 1.05 * quantile(theirs, q) + BOUND_S for q in (0.5, 0.99)),
        "trips": engine.cache._lower.tiers[0].trips,
    }


def recovery(engine: Rig, text: list[int]) -> dict[str, float]:
    """Seconds until the tier takes part again, and until a chunk comes from it, while requests go on."""
    tier, cost = engine.cache._lower.tiers[0], engine.cache.cost
    assert cost is not None
    speed = cost._tiers[tier.tier].fit
    landed, started = speed.count, time.monotonic()
    up_s: float | None = None
    while (up_s is None or speed.count == landed) and time.monotonic() - started < 2 * HEALS_S:
        if up_s is None and tier.is_up:
            up_s = time.monotonic() - started
        engine.evict_ram()
        ask(engine, text)
        time.sleep(0.1)
    read_s = time.monotonic() - started
    return {"up_after_s": 2.0 * HEALS_S if up_s is None else up_s, "read_after_s": read_s}


def fill(engine: Rig, alone: Alone) -> list[list[int]]:
    """Texts that lie below RAM, each computed once by both."""
    texts = [engine.text(n, TOKENS) for n in range(TEXTS)]
    for text in texts:
        engine.ask(text, 1)
        engine.settle(30)
        alone.seconds(text)
    return texts
