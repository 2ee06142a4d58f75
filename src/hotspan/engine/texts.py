"""Texts that are not about to run, named by the engine's hashes.

An invalidation's text is hashed on a thread of its own. Beside requests that costs their steps several times what the
hashing takes, since two threads hand Python's lock to each other; a text that nobody waits for is therefore only begun
there, and hashed by the scheduler's thread, between steps (announcing.py).

Tenants have turns at the thread, and invalidations go first: who announces many texts delays nobody's invalidation, and
who invalidates many delays another's by one text.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.v1.request import Request

from hotspan.core.terms import DEFAULT_TENANT
from hotspan.core.threads import start_worker
from hotspan.core.turns import InTurn
from hotspan.engine.manager import HotspanManager
from hotspan.engine.requests import RequestRecord

_SLICE_TOKENS = 128
_PAUSE_S = 0.0005
"""Python runs one thread at a time: between two slices of about 0.1 ms each the scheduler has its turn."""

_Item = tuple[Callable[[Mapping[str, Any]], Any], Mapping[str, Any], "Future[Any]"]
"""What is done with a command, and its answer."""


class Naming:
    """A text that is being named. Whichever thread calls `go_on` hashes."""

    def __init__(self, text: RequestRecord, tokens: Sequence[int]) -> None:
        self.text = text
        self._tokens = tokens
        self._at = text.request.num_tokens

    def go_on(self) -> bool:
        """Hash the next slice; whether the text is named."""
        if self._at < len(self._tokens):
            self.text.request.append_output_token_ids(list(self._tokens[self._at : self._at + _SLICE_TOKENS]))
            self._at += _SLICE_TOKENS
        self.text.by_group()
        return self._at >= len(self._tokens)


class Texts:
    """Begins and names texts, one at a time. hasher: makes the engine's function that names blocks."""

    def __init__(self, manager: HotspanManager, hasher: Callable[[], Callable[..., Any]]) -> None:
        self._manager = manager
        self._hasher = hasher
        self._waiting: InTurn[_Item] = InTurn()
        self._changed = threading.Condition()
        self._closing = False
        start_worker("texts", self._run, is_over=lambda: self._closing)

    def begin(self, command: Mapping[str, Any]) -> "Future[Naming]":
        """The text of a command, with what its names depend on."""
        return self._queued(self._begun, command, is_urgent=False)

    def submit(self, command: Mapping[str, Any]) -> "Future[RequestRecord]":
        """The text of an invalidation, once it is named."""
        return self._queued(self._named, command, is_urgent=True)

    def close(self) -> None:
        """Let go of the thread; what waits is cancelled."""
        with self._changed:
            self._closing = True
            while self._waiting:
                self._waiting.take()[-1].cancel()
            self._changed.notify()

    def _queued(
        self, do: Callable[[Mapping[str, Any]], Any], command: Mapping[str, Any], *, is_urgent: bool
    ) -> "Future[Any]":
        answer: Future[Any] = Future()
        with self._changed:
            if self._closing:
                raise RuntimeError("the engine ends")
            owner, item = str(command.get("tenant") or DEFAULT_TENANT), (do, command, answer)
            self._waiting.add(owner, item, is_urgent=is_urgent)
            self._changed.notify()
        answer.add_done_callback(lambda done: self._let_go(owner, item) if done.cancelled() else None)
        return answer

    def _let_go(self, owner: str, item: _Item) -> None:
        """Nobody waits for it any more: keep nothing of its text."""
        with self._changed:
            self._waiting.discard(owner, item)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                if self._closing:
                    return
                do, command, answer = self._waiting.take()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(do(command))
            except Exception as error:  # a Future that nobody answers would be waited for in vain
                answer.set_exception(error)

    def _begun(self, command: Mapping[str, Any]) -> Naming:
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
        return Naming(self._manager.named(request, keyer), tokens)

    def _named(self, command: Mapping[str, Any]) -> RequestRecord:
        naming = self._begun(command)
        while not naming.go_on():
            time.sleep(_PAUSE_S)
        return naming.text
