"""The engine's steps, as vLLM's scheduler shows them, for what is known of its load."""

from collections.abc import Iterator

from vllm.v1.core.sched.output import SchedulerOutput

from hotspan.cache.engine_queue import EngineQueue


class StepWatch(EngineQueue):
    """Sees each step when it is scheduled and when its output is there, which come in the same order."""

    def schedule(self, scheduled: SchedulerOutput) -> None:
        """A step was scheduled. Costs nothing per request that only decodes."""
        tokens = context = 0
        for request_id, start in self._starts(scheduled):
            prompt = self.prompt_tokens(request_id)
            stop = min(start + scheduled.num_scheduled_tokens.get(request_id, 0), prompt)
            if prompt:
                self.note(request_id, max(start, stop))
            if stop > start:
                tokens += stop - start
                context += (start + stop - 1) * (stop - start) // 2
        self.begin(tokens, context, scheduled.total_num_scheduled_tokens)

    def _starts(self, scheduled: SchedulerOutput) -> Iterator[tuple[str, int]]:
        """The requests of a step that may compute prompt tokens, each with how many tokens were computed before."""
        for request in scheduled.scheduled_new_reqs:
            yield request.req_id, request.num_computed_tokens
        cached, prefilling = scheduled.scheduled_cached_reqs, self.prefilling
        if prefilling or cached.resumed_req_ids:
            starts = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
            yield from ((name, starts[name]) for name in prefilling | cached.resumed_req_ids if name in starts)
