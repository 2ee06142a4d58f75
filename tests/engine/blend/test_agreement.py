"""Checks of blends: which, when, in whose blocks, and what turns blending off; a drift that is planted is found."""

from typing import Any

import numpy as np
import pytest

from hotspan.cache.stats import CacheStats
from hotspan.engine.blend.agreement import LEAST, Checks
from hotspan.engine.blend.orders import Checked

TOKENS: Any = np.zeros(64, np.uint32)
BLOCK = 16


class Pool:
    """An engine's blocks, as far as checks know them."""

    def __init__(self, blocks: int) -> None:
        self.num_gpu_blocks = self.free = blocks

    def get_num_free_blocks(self) -> int:
        return self.free

    def get_new_blocks(self, count: int) -> list[Any]:
        assert count <= self.free
        self.free -= count
        return [type("Block", (), {"block_id": number}) for number in range(count)]

    def free_blocks(self, blocks: list[Any]) -> None:
        self.free += len(blocks)


@pytest.fixture
def pool() -> Any:
    return Pool(32)


@pytest.fixture
def checks(pool: Any) -> Checks:
    made = Checks(1, 0.9, BLOCK, CacheStats())
    made.bind(pool)
    return made


def run(checks: Checks, number: int, found: Checked | None) -> str | None:
    """A blend that is checked, from its beginning on."""
    assert checks.is_due(number, TOKENS, 4) and not checks.begin()
    checks.allow(number)
    (job,) = checks.begin()
    assert job.number == number and len(job.blocks) == 4
    return checks.end(number, found)


@pytest.mark.parametrize("every", [0, 1, 3])
def test_one_in_so_many_is_checked(pool: Any, every: int) -> None:
    checks = Checks(every, 0.9, BLOCK, CacheStats())
    checks.bind(pool)
    due = []
    for number in range(9):
        due.append(checks.is_due(number, TOKENS, 4))
        checks.drop(number)
    assert sum(due) == (9 // every if every else 0)


def test_a_drift_turns_blending_off(checks: Checks, pool: Any) -> None:
    """Not before there are enough checks, and with a reason; figures are those of all checks."""
    results = [Checked(number % 2 == 0, 0.5) for number in range(LEAST)]
    reasons = [run(checks, number, found) for number, found in enumerate(results)]
    assert reasons[:-1] == [None] * (LEAST - 1)
    assert reasons[-1] == "only 5 of 10 blended answers began as after a full prefill (--blend-min-agreement 0.9)"
    assert checks._stats.blend_checks == {"agreed": 5, "differed": 5}
    assert (checks._stats.blend_agreement, checks._stats.blend_kl) == (0.5, 0.5) and pool.free == 32


def test_what_may_be_chance_turns_nothing_off(checks: Checks) -> None:
    """Seventeen of twenty may be nine of ten."""
    assert [run(checks, number, Checked(number % 7 != 0, 0.0)) for number in range(20)] == [None] * 20


def test_a_check_waits_for_its_request_and_for_room(checks: Checks, pool: Any) -> None:
    """It takes blocks only while twice as many are free, and gives them back as soon as the engine is short."""
    assert checks.is_due(1, TOKENS, 4) and not checks.is_busy
    pool.free = 7
    checks.allow(1)
    assert not checks.is_busy and not checks.begin()
    pool.free = 8
    assert checks.is_busy and len(checks.begin()) == 1 and pool.free == 4
    pool.free = 2
    assert not checks.begin() and checks.take_cancelled() == []
    pool.free = 1
    assert not checks.begin() and checks.take_cancelled() == [1]
    assert not checks.begin() and checks.take_cancelled() == [] and checks.is_busy
    assert checks.end(1, None) is None and pool.free == 5 and not checks.is_busy
    assert checks._stats.blend_checks == {"left_out": 1}


def test_what_can_not_be_checked_is_left_out(checks: Checks, pool: Any) -> None:
    """Whose last token has no block yet; what is too large for the engine; too many that wait."""
    assert not checks.is_due(1, TOKENS, 3)
    pool.num_gpu_blocks = 7
    assert not checks.is_due(2, TOKENS, 4)
    pool.num_gpu_blocks = 32
    assert [checks.is_due(number, TOKENS, 4) for number in range(3, 9)] == [True] * 4 + [False] * 2
    assert checks._stats.blend_checks == {"left_out": 4}
