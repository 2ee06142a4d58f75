"""Whether an engine core computes. It is asked from outside (client_steps.py), and needs nothing of vLLM's."""

import sys
from typing import Any, Final

UTILITY: Final = "hotspan_progress"


def offer_progress() -> None:
    """Let the clients of this process's engine core, if it has one, ask it. vLLM looks utility methods up by name."""
    module = sys.modules.get("vllm.v1.engine.core")
    if module is not None:
        setattr(module.EngineCore, UTILITY, progress)


def progress(core: Any) -> int | None:
    """How many steps have computed anything since this was asked first; None without work.

    Requests that come and end change nothing of it: they do so also where none is ever computed. A scheduler that is
    paused, as for an engine that sleeps, has no work.
    """
    if not hasattr(core, "hotspan_steps"):
        core.hotspan_steps = _Steps(core.scheduler)
    return core.hotspan_steps.computed if core.scheduler.get_num_unfinished_requests() else None


class _Steps:
    """Counts a scheduler's steps that compute. Mutates: the scheduler, whose `schedule` it follows."""

    def __init__(self, scheduler: Any) -> None:
        self.computed = 0
        self._schedule = scheduler.schedule
        scheduler.schedule = self._scheduled

    def _scheduled(self, *given: Any, **named: Any) -> Any:
        output = self._schedule(*given, **named)
        self.computed += output.total_num_scheduled_tokens > 0
        return output
