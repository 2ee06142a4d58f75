"""Loads that the scheduler's process could not prepare: workers report them as failed, and vLLM computes the text.

By the time that a load is prepared, vLLM counts on its bytes. It can still be told that they did not come.

    scheduler                               each worker
    `FailedLoad` in place of the slots      `FailedLoads.take`: the job is complete, and its request has failed; within
                                            a step that waited for it, the blocks are invalid
    `Lost`: there is no job                 `FailedLoads.lose`: the same

With several KV cache groups vLLM takes no invalid blocks: there nothing is loaded within a step (`inline.py`). Before
0.30 it hears from no worker that a request's load has failed: its scheduler asks (`older.py`).
"""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec


class FailedLoad(CPULoadStoreSpec):
    """The source of a load that was not prepared: no slots."""

    def __init__(self) -> None:
        super().__init__([])


@dataclass(slots=True)
class Lost:
    """What of a step has no load, though vLLM counts on it.

    requests: that wait for it. blocks: those that are counted on within the step.
    """

    requests: set[str] = field(default_factory=set)
    blocks: set[int] = field(default_factory=set)


class FailedLoads:
    """A worker's half. requests: whose loads were reported last as ended, and have failed."""

    def __init__(self) -> None:
        self.requests: set[str] = set()
        self._requests: set[str] = set()
        self._blocks: set[int] = set()

    def take(self, meta: OffloadingConnectorMetadata, inline: dict[int, str], told: OffloadingWorkerMetadata) -> None:
        """Take a step's failed loads out of its jobs.

        inline:  jobs that the step waits for. told: what this worker tells the scheduler of jobs.
        Mutates: `meta` and `told`.
        """
        failed = [job_id for job_id, job in meta.load_jobs.items() if isinstance(job.src_spec, FailedLoad)]
        for job_id in failed:
            job = meta.load_jobs.pop(job_id)
            told.completed_jobs[job_id] = 1
            if job_id in inline:
                self._blocks.update(job.dst_spec.block_ids.tolist())
            else:
                self._requests.add(job.req_id)

    def lose(self, lost: Lost) -> None:
        """Take what has no load at all."""
        self._requests |= lost.requests
        self._blocks |= lost.blocks

    def take_requests(self) -> set[str]:
        """The requests whose loads have failed since the last call; those of a step that waited are not among them.

        Mutates: `requests`, which has them until the next call.
        """
        self.requests, self._requests = self._requests, set()
        return self.requests

    def take_blocks(self) -> set[int]:
        """The blocks that have not the content that vLLM counts on."""
        taken, self._blocks = self._blocks, set()
        return taken
