"""What older schedulers do with loads, mended; python -m tests.engine.cuda.releases runs their own sources."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.request import RequestStatus

from hotspan.engine.older import advance, tell_failed


def request(name: str, priority: int = 0) -> Any:
    """A request as queues see it: by priority, then by name."""

    class Request(SimpleNamespace):
        __hash__ = object.__hash__

        def __lt__(self, other: Any) -> bool:
            return (self.priority, self.request_id) < (other.priority, other.request_id)

    return Request(
        request_id=name, priority=priority, status=RequestStatus.WAITING_FOR_REMOTE_KVS, num_computed_tokens=7
    )


@pytest.mark.parametrize(
    ("policy", "after"), [(SchedulingPolicy.FCFS, "c e a b d"), (SchedulingPolicy.PRIORITY, "a b c d e")]
)
def test_who_has_loaded_goes_first(policy: SchedulingPolicy, after: str) -> None:
    """In their own order, and the others in theirs; a queue by priority keeps its order."""
    queue = create_request_queue(policy)
    for name in "abcde":
        queue.add_request(request(name))
    advance(queue, {"c", "e", "gone"})
    assert [queue.pop_request().request_id for _ in range(5)] == after.split()


def test_a_failed_load_is_computed() -> None:
    """Of a request that waits for it; one that was aborted meanwhile is left alone."""
    waits, aborted = request("waits"), request("aborted")
    aborted.status = RequestStatus.FINISHED_ABORTED
    scheduler = SimpleNamespace(failed_recving_kv_req_ids=set())
    tell_failed(scheduler, [waits, aborted])
    assert scheduler.failed_recving_kv_req_ids == {"waits"}
    assert (waits.num_computed_tokens, aborted.num_computed_tokens) == (0, 7)
