"""Traces of the requests of one engine core, where a server that is not hotspan's takes them.

As engine/traces.py has them, with what the scheduler knows: a request came when vLLM's server took it, and its first
token is there when the next step begins. A request for `n` answers is `n` rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from hotspan.core.clock import Clock
from hotspan.engine.requests import RequestRecord
from hotspan.engine.traces import Recording, Row, Traces
from hotspan.engine.watching import RequestWatcher


class CoreTraces(RequestWatcher):
    """The recording of one engine core, if there is one.

    separators: texts that cut prompts into sections where the engine blends, as token ids.
    """

    def __init__(self, clock: Clock, separators: Sequence[Sequence[int]] = ()) -> None:
        self._clock = clock
        self._traces = Traces(clock.monotonic)
        self._traces.separators = separators
        self._open: dict[str, tuple[Recording, Row, RequestRecord]] = {}

    def answer(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """What was recorded since the last fetch, as `Traces.fetch`; nothing while another recording goes on.

        command: with `recording`, `block_tokens` and `is_last`.
        """
        name, block_tokens = str(command["recording"]), int(command["block_tokens"])
        return self._traces.fetch(name, block_tokens, is_last=bool(command["is_last"])) or {}

    def admit(self, record: RequestRecord) -> None:
        """A request came: if there is a recording, it is in it."""
        if (found := self._traces.active()) is None:
            return
        request, session = record.request, record.session
        waited_s = max(0.0, self._clock.unix() - request.arrival_time)
        name = None if session is None else f"{session.tenant}|{session.session}"
        row = found.row(self._clock.monotonic() - waited_s, name)
        found.running += 1
        self._open[request.request_id] = found, row, record

    def step(self) -> None:
        """Note the first token of each request that has one."""
        for _, row, record in self._open.values():
            self._note_first(row, record)

    def retire(self, record: RequestRecord) -> None:
        """A request ended: its row is kept."""
        request = record.request
        if (known := self._open.pop(request.request_id, None)) is None:
            return
        found, row, _ = known
        self._note_first(row, record)  # which may be its last
        found.running -= 1
        row.answer_tokens = request.num_output_tokens
        if not row.answer_tokens or not self._traces.takes(found, request.num_prompt_tokens):
            return
        row.cached_tokens = min(record.kept_tokens, request.num_prompt_tokens) if record.is_begun else 0
        row.finish_reason = _finish_reason(request)
        self._traces.note_prompt(found, row, request)
        self._traces.end(found, row)

    def _note_first(self, row: Row, record: RequestRecord) -> None:
        if row.first_s is None and record.request.num_output_tokens:
            row.first_s = self._clock.monotonic()


def _finish_reason(request: Request) -> str | None:
    """How an answer ended; None if that can't be told: vLLM's server finds stop strings itself, and then aborts."""
    reason, sampling = request.get_finished_reason(), request.sampling_params
    if reason == FinishReason.ABORT and sampling is not None and sampling.stop:
        return None
    return "" if reason is None else str(reason)
