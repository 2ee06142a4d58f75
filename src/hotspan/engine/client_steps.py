"""Whether an engine makes steps, as the process with its client sees it."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from vllm.platforms import current_platform

from hotspan.engine.compat import ask_cores
from hotspan.engine.progress import UTILITY

logger = logging.getLogger(__name__)


class ClientSteps:
    """An engine by its client (vLLM's AsyncLLM), as server/liveness.py watches it."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._tells = True  # whether its cores have hotspan's plugin

    @property
    def has_work(self) -> bool:
        """Whether requests are in work."""
        return bool(self._client.output_processor.has_unfinished_requests())

    async def turn(self) -> Sequence[int | None]:
        """How far each engine core is when it has ended the step it is in, or at once if it is idle."""
        if self._tells:
            try:
                return await ask_cores(self._client.engine_core, UTILITY)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                self._tells = False
                logger.warning("engine_progress_not_told error=%s: only a core that makes no step is seen", error)
        await ask_cores(self._client.engine_core, "is_sleeping")
        return ()

    @property
    def computes_on_cpu(self) -> bool:
        """Whether a step takes CPU time, also while it lasts long."""
        return bool(current_platform.is_cpu())
