"""Which chunks of RAM go to a tier below."""

import time

import pytest

from hotspan.cache.controller import StoreController
from hotspan.cache.stats import CacheStats
from hotspan.testing.chunks import chain
from tests.cache.rig import Rig
from tests.timing import TRIES


@pytest.mark.timing
def test_a_step_costs_the_same_however_many_wait() -> None:
    """To take one of 100,000 chunks that wait costs no more than to take one of 5,000."""

    def seconds(waiting: int) -> float:
        with Rig(ram=1, disk=1) as rig:
            controller = StoreController(rig.cache.ram, rig.tier, CacheStats())
            for chunk in chain("c", waiting):  # none of them is in RAM any more: each is taken and passed over
                controller.offer(chunk.key)
            started_s = time.thread_time()
            controller.step()
            assert controller.queued == 0
            return (time.thread_time() - started_s) / waiting

    many, few = (min(seconds(waiting) for _ in range(TRIES)) for waiting in (100_000, 5_000))
    assert many < 3 * few
