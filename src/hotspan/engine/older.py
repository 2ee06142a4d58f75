"""What the schedulers of older vLLM do with loads, made as those of newer ones.

before 0.31    A request whose load has ended holds its blocks, and waits behind those that need them: where the
               first of these finds no room, nothing is scheduled ever again. Here it goes first.
before 0.30    A load that failed is told by its blocks, which models with several KV cache groups do not take: the
               engine ends. Here the scheduler is told of its request.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from hotspan.engine.contract import ENGINE

if TYPE_CHECKING:
    from hotspan.engine.manager import HotspanManager

_schedule = Scheduler.schedule
_end_transfers = Scheduler._update_from_kv_xfer_finished


_engines: WeakSet[HotspanManager] = WeakSet()
"""Those of this process. Who is asked for another's request knows nothing of it, or lets it be computed."""


def mend_scheduler(engine: HotspanManager) -> None:
    """Mutates: vLLM's class, for all engine cores of this process."""
    if ENGINE < (0, 31):
        Scheduler.schedule = _ended_first
    if ENGINE < (0, 30):
        _engines.add(engine)
        Scheduler._update_from_kv_xfer_finished = _failed_told


@wraps(_end_transfers)
def _failed_told(scheduler: Any, output: Any) -> None:
    engines, ended = list(_engines), output.finished_recving or ()
    failed = [name for name in ended if any(engine.has_failed_load(name) for engine in engines)]
    tell_failed(scheduler, [scheduler.requests[name] for name in failed])
    _end_transfers(scheduler, output)


@wraps(_schedule)
def _ended_first(scheduler: Any, *given: Any, **named: Any) -> Any:
    if scheduler.finished_recving_kv_req_ids:
        advance(scheduler.skipped_waiting, scheduler.finished_recving_kv_req_ids)
    return _schedule(scheduler, *given, **named)


def advance(queue: Any, ended: set[str]) -> None:
    """Let requests whose loads have ended go first, also in a queue by priority. Mutates: `queue`, and the requests."""
    first = [request for request in queue if request.request_id in ended]
    queue.remove_requests(first)
    least = min((request.priority for request in queue), default=0)
    for request in reversed(first):
        request.priority = min(request.priority, least - 1)
        queue.prepend_request(request)


def tell_failed(scheduler: Any, failed: Iterable[Request]) -> None:
    """Let a scheduler compute the texts of requests whose loads are told as ended in this step, and have failed.

    Mutates: the scheduler's books, and the requests, as vLLM's do since 0.30.
    """
    for request in failed:
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
