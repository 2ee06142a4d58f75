"""Texts that an invalidation names by their tokens: hashed as the engine hashes them, and beside its scheduler."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.core.terms import DEFAULT_TENANT

_SLICE_TOKENS = 512
_PAUSE_S = 0.0005
"""Python runs one thread at a time: between two slices of about 0.3 ms each the scheduler has its turn."""


@dataclass(frozen=True, slots=True)
class NamedText:
    """A text with the engine's hashes of its blocks.

    start: the first token that is to be forgotten.
    """

    request: Request
    tenant: str
    lora: LoRARequest | None
    start: int


class TextHasher:
    """Hashes texts one after the other on a thread of its own.

    hasher:  makes the engine's function that names blocks. warm: called before, with what else their names depend on.
    """

    def __init__(
        self, hasher: Callable[[], Callable[..., Any]], warm: Callable[[str, LoRARequest | None], object]
    ) -> None:
        self._hasher = hasher
        self._warm = warm
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotspan-texts")

    def submit(self, command: Mapping[str, Any]) -> Future[NamedText]:
        """The text of a command: its tokens, tenant, salt and adapter."""
        return self._thread.submit(self._hash, command)

    def close(self) -> None:
        """Hash no more."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _hash(self, command: Mapping[str, Any]) -> NamedText:
        path, name = command.get("adapter_path"), command.get("adapter_name")
        lora = LoRARequest(str(name), 1, str(path)) if path is not None else None
        tenant = str(command.get("tenant") or DEFAULT_TENANT)
        self._warm(tenant, lora)
        tokens = [int(token) for token in command["tokens"]]
        request = Request(
            request_id="hotspan-invalidate",
            prompt_token_ids=tokens[:_SLICE_TOKENS],
            sampling_params=SamplingParams(max_tokens=1),
            pooling_params=None,
            lora_request=lora,
            cache_salt=command.get("cache_salt"),
            block_hasher=self._hasher(),
        )
        for at in range(_SLICE_TOKENS, len(tokens), _SLICE_TOKENS):
            time.sleep(_PAUSE_S)
            request.append_output_token_ids(tokens[at : at + _SLICE_TOKENS])
        return NamedText(request, tenant, lora, int(command.get("tokens_from") or 0))
