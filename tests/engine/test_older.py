"""What older schedulers do with loads, mended; python -m tests.engine.cuda.releases runs their own sources."""

import gc
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from hotspan.engine import older
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
    ("policy", "after"), [(SchedulingPolicy.FCFS, "c e a b d"), (SchedulingPolicy.PRIORITY, "c e a b d")]
)
def test_who_has_loaded_goes_first(policy: SchedulingPolicy, after: str) -> None:
    """In their own order, and the others in theirs, also where a queue is one by priority."""
    queue = create_request_queue(policy)
    for name in "abcde":
        queue.add_request(request(name))
    advance(queue, {"c", "e", "gone"})
    assert [queue.pop_request().request_id for _ in range(5)] == after.split()


def test_each_engine_of_a_process_is_asked_for_its_failed_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The class of vLLM's schedulers is one for all of them; an engine that is gone is not kept."""

    class Engine:
        def __init__(self, *failed: str) -> None:
            self.has_failed_load = {*failed}.__contains__

    ended: list[Any] = []
    monkeypatch.setattr(older, "_end_transfers", lambda scheduler, output: ended.append(output))
    monkeypatch.setattr(older, "ENGINE", (0, 29))
    monkeypatch.setattr(older, "_engines", WeakSet())
    for name in ("schedule", "_update_from_kv_xfer_finished"):
        monkeypatch.setattr(Scheduler, name, getattr(Scheduler, name))
    first, second = Engine("lost"), Engine()
    older.mend_scheduler(first)
    older.mend_scheduler(second)
    requests = {name: request(name) for name in ("lost", "loaded")}
    scheduler: Any = SimpleNamespace(requests=requests, failed_recving_kv_req_ids=set())
    output = SimpleNamespace(finished_recving={"lost", "loaded"})
    Scheduler._update_from_kv_xfer_finished(scheduler, output)
    assert scheduler.failed_recving_kv_req_ids == {"lost"} and ended == [output]
    del first
    gc.collect()
    assert list(older._engines) == [second]


def test_a_failed_load_is_computed() -> None:
    """Of a request that waits for it; one that was aborted meanwhile is left alone."""
    waits, aborted = request("waits"), request("aborted")
    aborted.status = RequestStatus.FINISHED_ABORTED
    scheduler = SimpleNamespace(failed_recving_kv_req_ids=set())
    tell_failed(scheduler, [waits, aborted])
    assert scheduler.failed_recving_kv_req_ids == {"waits"}
    assert (waits.num_computed_tokens, aborted.num_computed_tokens) == (0, 7)
