"""How long a step may wait for the loads of the requests that are here, and what its time says."""

from hotspan.cache.choice import Text
from hotspan.cache.tiered import TieredCache
from hotspan.core.clock import Clock
from hotspan.engine.blend.admission import Blending
from hotspan.engine.encoder.outputs import EncoderOutputs
from hotspan.engine.net import netted
from hotspan.engine.prefixes import GpuPrefixes
from hotspan.engine.present import PresentRequests
from hotspan.engine.requests import Admission, RequestRecord
from hotspan.engine.steps import StepWatch


class StepWaits(PresentRequests):
    """The requests that are here, and the steps of their engine.

    steps: of a cache that decides what to load; None if it loads what it finds.
    """

    def __init__(
        self,
        cache: TieredCache,
        admission: Admission,
        prefixes: GpuPrefixes,
        clock: Clock,
        blending: Blending | None,
        outputs: EncoderOutputs | None,
        steps: StepWatch | None,
        chunk_tokens: int,
    ) -> None:
        super().__init__(cache, admission, prefixes, clock, blending, outputs)
        self.steps = steps
        self.chunk_tokens = chunk_tokens

    @property
    def token_bytes(self) -> float:
        """Of KV in the tiers, over all groups."""
        return self.cache.ram.slab.slot_bytes * self.group_count / self.chunk_tokens

    def _text_of(self, record: RequestRecord) -> Text | None:
        """A request's prompt as the cost model sees it now; None without one."""
        if self.steps is None:
            return None
        request, tokens = record.request, record.ranked[0].tokens if record.groups else self.chunk_tokens
        waiting = self.cache.waiting
        return self.steps.text(
            request.request_id, request.num_prompt_tokens, tokens, record.engine_tokens, waiting=waiting
        )

    @netted(lambda: None)
    def note_blends(self) -> None:
        """The step that was scheduled last computes tokens of blends, too: its time says nothing of others."""
        if self.steps is not None:
            self.steps.disregard()

    @netted(lambda: None)
    def note_copies(self, size: int, seconds: float) -> None:
        """The worker copied so many bytes from RAM to the engine, in so much of its thread's time."""
        if self.cache.cost is not None and size:
            self.cache.cost.observe_copy(size, seconds)

    @netted(lambda: False)
    def may_stall(self, tokens: int) -> bool:
        """Whether the step that is being scheduled may wait for the copies of a request that loads so many tokens."""
        if self.steps is None or self.cache.cost is None:
            return True
        return self.steps.may_stall(self.cache.cost.copy_s(self._size(tokens)))

    @netted(lambda: None)
    def note_stall(self, tokens: int) -> None:
        """The step that is being scheduled waits for such copies."""
        if self.steps is not None and self.cache.cost is not None:
            self.steps.stall(self.cache.cost.copy_s(self._size(tokens)))

    @netted(lambda: False)
    def await_chunks(self, request_id: str) -> bool:
        """Wait for the chunks of a request if that holds up the step only a little; whether all of them came.

        Blocks: at most a tenth of a step.
        """
        record = self._records.get(request_id)
        if record is None or record.plan is None or self.steps is None or not record.waiting:
            return False
        left_s = self.steps.stall_left_s
        if record.plan.choice.load_s > left_s:
            return False
        began_s = self._clock.monotonic()
        for _ in range(len(record.waiting) + 1):  # each time at least one lands, or the time is over
            waited_s = self._clock.monotonic() - began_s
            if not record.waiting or waited_s >= left_s:
                break
            self.cache.wait(left_s - waited_s)
            self.cache.step()
        self.steps.stall(self._clock.monotonic() - began_s)
        return not record.waiting

    @netted(lambda: None)
    def end_step(self) -> None:
        """The output of the oldest step was processed."""
        if self.steps is not None:
            self.steps.end()

    def _size(self, tokens: int) -> int:
        """Bytes of so many tokens in RAM, over all groups."""
        return -(-tokens // self.chunk_tokens) * self.group_count * self.cache.ram.slab.slot_bytes
