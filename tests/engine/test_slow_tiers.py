"""The small version of benchmarks/slow_disk.py and slow_l2.py: sick tiers under a real engine, with real threads, disk,
Redis and sockets, cost a computation and no request. How long requests take then: test_sick_tiers.py, in simulated
time, and the benchmarks.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.beside_alone import CHUNK_GIB
from benchmarks.slow_disk import Sickness, fail, hang
from hotspan.config.settings import L2Settings
from hotspan.core.types import Tier
from kit.engine import Rig, rig
from kit.link import Trouble, TroubledLink
from kit.redis_server import RedisServer

pytestmark = pytest.mark.engine

TOKENS = 1200
HANG_S = 60.0
GONE = Trouble(is_refusing=True)
LINKS = {
    "slow": Trouble(bytes_per_s=1e5),
    "far": Trouble(delay_s=2.0),
    "hung": Trouble(is_hung=True),
    "gone": GONE,
    "broken": Trouble(breaks_at=1 << 18),
    "garbling": Trouble(is_garbling=True),
}
RELEASED = threading.Event()
DISKS: dict[str, Callable[[], None]] = {"slow": lambda: time.sleep(3), "failing": fail, "hung": lambda: hang(RELEASED)}


def kinds(names: Iterable[str], gated: str) -> list[Any]:
    """One of them for every change, the others are slow: each waits until a circuit breaker has closed."""
    return [pytest.param(name, marks=() if name == gated else pytest.mark.slow) for name in names]


@dataclass
class Sick:
    """An engine over a disk and an L2 whose health is the test's, with texts and their answers."""

    engine: Rig
    disk: Sickness
    link: TroubledLink
    expected: list[tuple[list[int], list[int]]]

    def check_answers(self) -> None:
        """Each text is answered as ever, while the trouble lasts."""
        for text, tokens in self.expected:
            self.forget()
            assert self.engine.ask(text).tokens == tokens

    def read_again(self, tier: Tier) -> None:
        """Wait until a chunk comes from a tier, be it only to see how fast it is, while requests go on."""
        assert self.engine.cache.cost is not None
        speed = self.engine.cache.cost._tiers[tier].fit
        landed, deadline = speed.count, time.monotonic() + HANG_S
        while speed.count == landed:
            assert time.monotonic() < deadline, f"{tier} does not come back"
            self.forget()
            self.engine.ask(self.expected[0][0])
            time.sleep(0.2)

    def forget(self) -> None:
        self.engine.forget_ram()
        self.engine.forget_gpu()


@pytest.fixture(scope="module")
def sick(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sick]:
    directory, sickness = tmp_path_factory.mktemp("sick"), Sickness()
    server = RedisServer(directory)
    server.start()
    try:
        with sickness.installed(), TroubledLink("127.0.0.1", server.port) as link:
            l2 = L2Settings(f"redis://127.0.0.1:{link.port}", {"timeout_s": "0.5"})
            cache = {"patience_s": None, "drain_s": 1.0, "l2": l2}
            with rig(tiny_model, ram_gib=8 * CHUNK_GIB, disk=directory / "kv", cache=cache) as engine:
                texts = [engine.text(n, TOKENS) for n in range(3)]
                expected = []
                for text in texts:
                    expected.append((text, engine.ask(text).tokens))
                    engine.settle()
                yield Sick(engine, sickness, link, expected)
                assert engine.digests.wrong == 0
    finally:
        server.stop()


@pytest.mark.parametrize("kind", kinds(DISKS, gated="hung"))
def test_a_sick_disk(sick: Sick, kind: str) -> None:
    """Every answer is right, and comes before the disk is well; then it is used again. The L2 is away meanwhile."""
    sick.link.trouble = GONE
    RELEASED.clear()
    sick.disk.before = DISKS[kind]
    try:
        sick.check_answers()
    finally:
        sick.disk.before = lambda: None
        RELEASED.set()
    sick.read_again(Tier.DISK)
    sick.link.trouble = Trouble()
    assert sick.engine.cache.cost is not None
    report = sick.engine.cache.cost.report()
    assert report.prefill.count and report.loaded and report.tokens_per_s
    assert report.late or kind == "failing"


@pytest.mark.parametrize("kind", kinds(LINKS, gated="garbling"))
def test_a_sick_l2(sick: Sick, kind: str) -> None:
    """The same, while the disk fails."""
    sick.disk.before = fail
    sick.link.trouble = LINKS[kind]
    sick.check_answers()
    sick.link.trouble = Trouble()
    sick.read_again(Tier.L2)
    sick.disk.before = lambda: None
