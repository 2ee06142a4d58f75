"""How far an engine core's requests are. It is asked from outside (client_steps.py), and needs nothing of vLLM's."""

import hashlib
import sys
from typing import Any, Final

UTILITY: Final = "hotspan_progress"


def offer_progress() -> None:
    """Let the clients of this process's engine core, if it has one, ask it. vLLM looks utility methods up by name."""
    module = sys.modules.get("vllm.v1.engine.core")
    if module is not None:
        setattr(module.EngineCore, UTILITY, progress)


def progress(core: Any) -> int | None:
    """A number that is another one once anything was computed, or a request came or ended; None without work.

    A scheduler that is paused, as for an engine that sleeps, has no work.
    """
    scheduler = core.scheduler
    if not scheduler.get_num_unfinished_requests():
        return None
    seen = hashlib.blake2b(digest_size=7)
    for name, request in scheduler.requests.items():
        seen.update(f"{name} {request.num_computed_tokens} {request.num_tokens} ".encode())
    return int.from_bytes(seen.digest())
