"""What the schedulers of older vLLM do with loads, made as those of newer ones.

before 0.31    A request whose load has ended holds its blocks, and waits behind those that need them: where the
               first of these finds no room, nothing is scheduled ever again. Here it goes first.
before 0.30    A load that failed is told by its blocks, which models with several KV cache groups do not take: the
               engine ends. Here the scheduler is told of its request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from hotspan.engine.contract import ENGINE

_schedule = Scheduler.schedule
_end_transfers = Scheduler._update_from_kv_xfer_finished


def mend_scheduler(has_failed: Callable[[str], bool]) -> None:
    """Mutates: vLLM's class, for all engine cores of this process.

    has_failed: whether a request's load has failed, by the request's id. Only the last caller is asked.
    """
    if ENGINE < (0, 31):
        Scheduler.schedule = _ended_first
    if ENGINE < (0, 30):

        @wraps(_end_transfers)
        def end_transfers(scheduler: Any, output: Any) -> None:
            ended = [scheduler.requests[name] for name in output.finished_recving or () if has_failed(name)]
            tell_failed(scheduler, ended)
            _end_transfers(scheduler, output)

        Scheduler._update_from_kv_xfer_finished = end_transfers


@wraps(_schedule)
def _ended_first(scheduler: Any, *given: Any, **named: Any) -> Any:
    if scheduler.finished_recving_kv_req_ids:
        advance(scheduler.skipped_waiting, scheduler.finished_recving_kv_req_ids)
    return _schedule(scheduler, *given, **named)


def advance(queue: Any, ended: set[str]) -> None:
    """Let requests whose loads have ended go first. A queue by priority keeps its order. Mutates: `queue`."""
    first = [request for request in queue if request.request_id in ended]
    queue.remove_requests(first)
    for request in reversed(first):
        queue.prepend_request(request)


def tell_failed(scheduler: Any, failed: Iterable[Request]) -> None:
    """Let a scheduler compute the texts of requests whose loads are told as ended in this step, and have failed.

    Mutates: the scheduler's books, and the requests, as vLLM's do since 0.30.
    """
    for request in failed:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
