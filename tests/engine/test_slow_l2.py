"""The small version of benchmarks/slow_l2.py: a sick L2 under a real engine costs a computation, no request."""

import time
from pathlib import Path

import pytest

from benchmarks.beside_alone import CHUNK_GIB
from benchmarks.link import Trouble, TroubledLink
from hotspan.config.settings import L2Settings
from hotspan.core.types import Tier
from tests.l2.servers import RedisServer

from .rig import Rig, rig

pytestmark = pytest.mark.engine

TOKENS = 1200
WITHIN_S = 1.0
"""What a request may take beyond its computation here: far more than the bound, far less than the troubles last."""

TROUBLES = [
    Trouble(bytes_per_s=1e5),
    Trouble(delay_s=2.0),
    Trouble(is_hung=True),
    Trouble(is_refusing=True),
    Trouble(breaks_at=1 << 18),
    Trouble(is_garbling=True),
]


@pytest.mark.timing
def test_requests_over_a_sick_l2_are_answered_as_without_one(tiny_model: Path, tmp_path: Path) -> None:
    """Slow, far, hung, gone, breaking, garbling: every answer is right and in time; once well, it is used again."""
    server = RedisServer(tmp_path)
    server.start()
    try:
        with TroubledLink("127.0.0.1", server.port) as link:
            l2 = L2Settings(f"redis://127.0.0.1:{link.port}", {"timeout_s": "0.5"})
            cache = {"patience_s": None, "drain_s": 1.0, "l2": l2}
            with rig(tiny_model, ram_gib=8 * CHUNK_GIB, cache=cache) as engine:
                check(engine, link)
    finally:
        server.stop()


def check(engine: Rig, link: TroubledLink) -> None:
    """Ask the same texts under each trouble."""
    texts = [engine.text(n, TOKENS) for n in range(3)]
    expected, computed_s = [], []
    for text in texts:
        started = time.monotonic()
        expected.append(engine.ask(text).tokens)
        computed_s.append(time.monotonic() - started)
        engine.settle()
    for trouble in TROUBLES:
        link.trouble = trouble
        for text, tokens in zip(texts, expected, strict=True):
            engine.evict_ram()
            engine.forget_gpu()
            started = time.monotonic()
            assert engine.ask(text).tokens == tokens, trouble
            assert time.monotonic() - started < 2 * max(computed_s) + WITHIN_S, trouble
        link.trouble = Trouble()
        assert is_read_again(engine, texts[0], 40), f"the tier does not come back after {trouble}"
    assert engine.digests.wrong == 0


def is_read_again(engine: Rig, text: list[int], within_s: float) -> bool:
    """Whether a chunk comes from the L2 within that time, be it only to see how fast it is, while requests go on."""
    assert engine.cache.cost is not None
    speed = engine.cache.cost._tiers[Tier.L2].fit
    landed, deadline = speed.count, time.monotonic() + within_s
    while time.monotonic() < deadline and speed.count == landed:
        engine.evict_ram()
        engine.forget_gpu()
        engine.ask(text)
        time.sleep(0.2)
    return speed.count > landed
