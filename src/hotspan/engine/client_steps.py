"""Whether an engine makes steps, as the process with its client sees it."""

from typing import Any

from vllm.platforms import current_platform

from hotspan.engine.compat import ask_cores


class ClientSteps:
    """An engine by its client (vLLM's AsyncLLM), as server/liveness.py watches it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    @property
    def has_work(self) -> bool:
        """Whether requests are in work."""
        return bool(self._client.output_processor.has_unfinished_requests())

    async def turn(self) -> None:
        """Return when each engine core has ended the step it is in, or at once if it is idle."""
        await ask_cores(self._client.engine_core, "is_sleeping")

    @property
    def computes_on_cpu(self) -> bool:
        """Whether a step takes CPU time, also while it lasts long."""
        return bool(current_platform.is_cpu())
