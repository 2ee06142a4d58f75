"""Which chunks of RAM go to a tier below."""

from hotspan.cache.controller import StoreController
from hotspan.cache.stats import CacheStats
from hotspan.testing.chunks import chain
from tests.cache.rig import Rig
from tests.operations import operations


def test_a_step_costs_the_same_however_many_wait() -> None:
    """To take one of 8,000 chunks that wait takes as many operations as to take one of 1,000."""

    def each(waiting: int) -> float:
        with Rig(ram=1, disk=1) as rig:
            controller = StoreController(rig.cache.ram, rig.tier, CacheStats())
            for chunk in chain("c", waiting):  # none of them is in RAM any more: each is taken and passed over
                controller.offer(chunk.key)
            count = operations(controller.step)
            assert controller.queued == 0 and count > waiting
            return count / waiting

    assert each(8_000) < 1.1 * each(1_000)
