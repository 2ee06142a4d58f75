"""Texts that are not about to run, named by the engine's hashes, on a thread of their own."""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.core.terms import DEFAULT_TENANT
from hotspan.engine.manager import HotspanManager
from hotspan.engine.requests import RequestRecord
from hotspan.tiers.pace import rest_s

_SLICE_TOKENS = 128
_PAUSE_S = 0.0005
"""Python runs one thread at a time: between two slices of about 0.1 ms each the scheduler has its turn."""


class Texts:
    """Hashes one text after the other. hasher: makes the engine's function that names blocks."""

    def __init__(self, manager: HotspanManager, hasher: Callable[[], Callable[..., Any]]) -> None:
        self._manager = manager
        self._hasher = hasher
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotspan-texts")

    def submit(self, command: Mapping[str, Any], *, is_modest: bool = False) -> "Future[RequestRecord]":
        """The text of a command.

        is_modest: nobody waits for it; beside requests it takes as little of a core as loads that nobody waits for.
        """
        return self._thread.submit(self._named, command, is_modest=is_modest)

    def close(self) -> None:
        """Let go of the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _named(self, command: Mapping[str, Any], *, is_modest: bool) -> RequestRecord:
        """On the thread. The adapter's files are read and the tenant's keys asked for here, so that the scheduler's
        thread finds both.
        """
        path, name = command.get("adapter_path"), command.get("adapter_name")
        lora = LoRARequest(str(name), 1, str(path)) if path is not None else None
        tokens: Sequence[int] = command["tokens"]
        keyer = self._manager.keyer(str(command.get("tenant") or DEFAULT_TENANT), lora)
        request = Request(
            request_id="hotspan-invalidate",
            prompt_token_ids=list(tokens[:_SLICE_TOKENS]),
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=lora,
            cache_salt=command.get("cache_salt"),
            block_hasher=self._hasher(),
        )
        text = self._manager.named(request, keyer)
        for at in range(_SLICE_TOKENS, len(tokens), _SLICE_TOKENS):
            began_s = time.thread_time()
            request.append_output_token_ids(list(tokens[at : at + _SLICE_TOKENS]))
            text.by_group()
            self._pause(time.thread_time() - began_s, is_modest=is_modest)
        text.all_chunks()
        return text

    def _pause(self, worked_s: float, *, is_modest: bool) -> None:
        """Let the scheduler's thread have its turn."""
        is_slow = is_modest and self._manager.cache.prefetches.is_busy
        time.sleep(max(_PAUSE_S, rest_s(worked_s)) if is_slow else _PAUSE_S)
