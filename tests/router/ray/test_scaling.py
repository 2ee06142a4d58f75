"""The number of replicas that queues of so many seconds ask for."""

from types import SimpleNamespace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.router.ray.scaling import QUEUE_SECONDS, QueueSeconds

queues = st.lists(st.floats(0, 1000), min_size=1, max_size=40)


@given(st.floats(0.1, 60), queues)
def test_more_as_the_queue_asks(target_s: float, queues_s: list[float]) -> None:
    """With more work than the target allows, there are to be so many that the work divided by them is the target."""
    count = len(queues_s)
    wanted = QueueSeconds(target_s).wanted(count, queues_s)
    if sum(queues_s) > target_s * count * (1 + 1e-9):
        assert wanted > count
    assert wanted < count or sum(queues_s) / wanted <= target_s * (1 + 1e-9)
    assert wanted >= 1


@given(st.floats(0.1, 60), queues)
@example(0.1, [2.0])  # what it spreads over 20 adds up to a little more
def test_it_does_not_swing(target_s: float, queues_s: list[float]) -> None:
    """What it asks for, it still does not want more of once the work has spread over that many."""
    policy, total_s = QueueSeconds(target_s), sum(queues_s)
    wanted = policy.wanted(len(queues_s), queues_s)
    assert policy.wanted(wanted, [total_s / wanted] * wanted) <= wanted


def test_idle_ones_go_one_by_one() -> None:
    """Without work one goes at a time, and the last one stays."""
    policy = QueueSeconds(2.0)
    assert policy.wanted(5, [0.0] * 5) == 4 and policy.wanted(1, [0.0]) == 1


def test_without_figures_nothing_changes() -> None:
    """As long as no replica says how it is, there are as many as were wanted."""
    context = SimpleNamespace(aggregated_metrics={}, target_num_replicas=3)
    assert QueueSeconds(2.0)(context) == (3, {})
    context = SimpleNamespace(aggregated_metrics={QUEUE_SECONDS: {"a": 9.0, "b": 9.0}}, target_num_replicas=2)
    assert QueueSeconds(2.0)(context) == (9, {})


def test_a_target_is_above_nothing() -> None:
    """A target of 0 s would have no end of replicas."""
    with pytest.raises(ConfigError, match="--target-queue-seconds"):
        QueueSeconds(0)
