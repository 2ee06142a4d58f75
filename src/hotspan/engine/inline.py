"""Loads from RAM that the step which begins with them waits for, so that their request is computed in that very step.

vLLM's offloading connector loads beside a step, and the request begins in the next one: under load that is a whole
step of others' prompts. A copy in host memory takes a few milliseconds, so a short one is made before the forward pass
instead. vLLM's scheduler calls such a load synchronous.

    scheduler                                      each worker
    asked: (tokens, not asynchronous)
    blocks allocated, vLLM makes its load job
    `take`: the job leaves vLLM's books            `submit_load`, and `wait` before the forward pass
    `note`: all workers reported it                reported as complete, but not as a request that received
"""

from dataclasses import dataclass
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.request import Request

from hotspan.engine.contract import ENGINE
from hotspan.engine.manager import HotspanManager


class FreshBlock(NamedTuple):
    """A block as vLLM's connector looks at it: one that nothing has been loaded into."""

    block_id: int
    is_null: bool
    block_hash: None = None


@dataclass(slots=True)
class _Load:
    """A load that a step waits for. pending: workers that have not reported it."""

    keys: set[OffloadKey]
    context: ReqContext
    pending: int


def can_load_inline(scheduler: OffloadingConnectorScheduler) -> bool:
    """Whether the engine starts such loads before its forward pass, and its texts are chains of one group.

    Of a sliding window only the end is loaded: its blocks can't be told from those that are to be computed. Of several
    groups vLLM can't be told that a load has failed for which a step waits (`failed_loads.py`).
    """
    groups = scheduler.config.kv_group_configs
    return ENGINE >= (0, 32) and len(groups) == 1 and groups[0].sliding_window_size_in_chunks is None


class InlineLoads:
    """The scheduler's half. One thread calls it."""

    def __init__(self, scheduler: OffloadingConnectorScheduler, manager: HotspanManager) -> None:
        self._scheduler = scheduler
        self._manager = manager
        self._loads: dict[int, _Load] = {}
        self._asked: str | None = None  # the request that was answered last, if it may load inline
        self._step: dict[int, str] = {}  # jobs of the step that is being scheduled, and their requests

    def answer(self, request: Request, have_tokens: int, load_tokens: int) -> bool:
        """Whether a request that has tokens and is to load more may do so within the step that is being scheduled."""
        self._asked = None
        if not load_tokens or have_tokens + load_tokens >= request.num_tokens:
            return False  # vLLM computes the last token anew, and does so for asynchronous loads only
        if not self._manager.may_stall(load_tokens):
            return False
        self._asked = request.request_id
        return True

    def is_asked(self, request: Request) -> bool:
        """Whether a request was told to load within the step that is being scheduled."""
        return self._asked == request.request_id

    def withdraw(self, request: Request) -> None:
        """Its load has no job after all, and vLLM was told so."""
        self._asked = None
        for job_id in [job_id for job_id, name in self._step.items() if name == request.request_id]:
            del self._step[job_id]
            self._loads.pop(job_id, None)

    def fresh(self, request: Request, blocks: KVCacheBlocks) -> KVCacheBlocks | None:
        """The blocks of a request that loads inline, as they were before vLLM named them by their future content.

        None for a request that does not load inline.
        """
        if self._asked != request.request_id:
            return None
        groups = [[FreshBlock(block.block_id, block.is_null) for block in group] for group in blocks.blocks]
        return KVCacheBlocks(tuple(groups))

    def take(self, request: Request, tokens: int) -> None:
        """vLLM has just made the job of a request that loads inline: from now on its books are here."""
        self._asked = None
        state = self._scheduler._req_status[request.request_id]
        (job_id,) = state.transfer_jobs
        state.transfer_jobs.clear()
        job = self._scheduler._jobs.pop(job_id)
        if self._scheduler._chunks_being_loaded:
            self._scheduler._chunks_being_loaded.difference_update(job.keys)
        self._step[job_id] = request.request_id
        self._loads[job_id] = _Load(job.keys, state.req_context, job.pending_count)
        self._manager.note_stall(tokens)

    def scheduled(self) -> dict[int, str]:
        """The jobs for which the step that was scheduled waits, and their requests."""
        jobs, self._step = self._step, {}
        return jobs

    def note(self, meta: OffloadingWorkerMetadata) -> None:
        """Workers have reported jobs. Mutates: takes those of here out of the report."""
        for job_id in self._loads.keys() & meta.completed_jobs.keys():
            load = self._loads[job_id]
            load.pending -= meta.completed_jobs.pop(job_id)
            if load.pending <= 0:
                del self._loads[job_id]
                self._manager.complete_load(load.keys, load.context)

    def reset(self) -> dict[int, int]:
        """The engine forgets its copies in flight: those of here, with the workers that have not reported them."""
        stale = {job_id: load.pending for job_id, load in self._loads.items()}
        self._loads.clear()
        return stale
