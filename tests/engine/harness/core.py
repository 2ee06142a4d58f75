"""The engine without a model: vLLM's real EngineCore and Scheduler, hotspan's connector, cache and tiers, real copies
between the engine's KV cache and the slab. Only the model is missing (`runner.py`), so that a step takes a millisecond.

    with core(model_directory) as engine:
        engine.start("a", engine.text(1, 600), tags=["doc"])
        engine.step()                                    # the request runs, or waits
        engine.administer(do="invalidate", tags=["doc"])
        assert engine.finish() == {"a": 0}               # tokens that were cached
        assert engine.runner.wrong == 0

The directory needs a configuration only; weights are read for the namespace, and never run.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
import random
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState
from vllm.v1.request import Request

from hotspan.config.connector import transfer_config
from hotspan.config.settings import CacheOptions, L2Settings
from hotspan.core.clock import Clock
from hotspan.engine import opening
from kit.engine import CHUNK, HANG_S, Tiers, sampling
from kit.simulated.memory_store import MemoryServer

from .runner import KnownBytes

BLOCK = 64
STEP_TOKENS = 1024

_numbers = itertools.count()


class Core(Tiers):
    """A running engine core. One thread uses it: the test's, which is the scheduler's."""

    def __init__(self, core: EngineCore) -> None:
        super().__init__(core)
        self.administrator = self.connector.administrator
        self.follower = self.administrator._follower
        self.prefixes = self.manager.prefixes
        self.runner: KnownBytes = core.model_executor
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def text(self, seed: int, tokens: int) -> list[int]:
        """`tokens` tokens that no other seed has."""
        chance = random.Random(seed)
        return [chance.randrange(3, 700) for _ in range(tokens)]

    def start(
        self,
        name: str,
        prompt: list[int],
        tokens: int = 1,
        *,
        salt: str | None = None,
        lora: LoRARequest | None = None,
        resumable: bool = False,
        **directives: Any,
    ) -> Request:
        """Hand a request to the scheduler, where it waits for the next step. resumable: the next part has its name."""
        request = Request(
            name,
            list(prompt),
            sampling(tokens, directives),
            None,
            cache_salt=salt,
            lora_request=lora,
            block_hasher=self.core.request_block_hasher,
            resumable=resumable,
        )
        self.core.add_request(request)
        return request

    def step(self, times: int = 1) -> dict[str, int]:
        ended = {}
        for _ in range(times):
            found, has_computed = self.core.step_fn()
            self.core.post_step(has_computed)
            for outputs in (found or {}).values():  # nothing while a queue of steps fills
                for output in outputs.outputs:
                    self.answers.setdefault(output.request_id, []).extend(output.new_token_ids)
                    if output.prefill_stats is not None:
                        self.cached[output.request_id] = output.prefill_stats.num_cached_tokens
                    if output.finish_reason is not None:
                        ended[output.request_id] = self.cached.get(output.request_id, 0)
        return ended

    def finish(self) -> dict[str, int]:
        """Let every request end; cached tokens by name."""
        ended: dict[str, int] = {}
        self.until(lambda: not self.scheduler.get_num_unfinished_requests(), lambda: ended.update(self.step()))
        return ended

    def ask(self, prompt: list[int], tokens: int = 1, **options: Any) -> int:
        """How many tokens of a prompt were cached."""
        name = f"asked-{next(_numbers)}"
        self.start(name, prompt, tokens, **options)
        return self.finish()[name]

    def stored(self, prompt: list[int], **options: Any) -> list[int]:
        """The prompt, once it lies on every tier."""
        self.ask(prompt, **options)
        self.settle()
        return prompt

    def rpc(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Ask the workers for something that may change their weights, as `LLM.collective_rpc` does."""
        self.runner.mix(self.scheduler.requests)
        return self.core.collective_rpc(method, None, args, kwargs)

    def until_named(self) -> str:
        """Wait until the weights have a name; what that is made of."""
        state = lambda: self.connector.weights.state  # noqa: E731
        self.until(lambda: state().source is not None, self.administrator.run_waiting)
        return str(state().source)

    def logged(self) -> int:
        """How many entries the disk's log was given."""
        return int(self.cache._lower.tiers[0].storage._generation)

    def check(self) -> None:
        """Raise AssertionError if any books do not agree, or KV was read that is another's."""
        self.cache.check()
        self.prefixes.check()
        assert self.runner.wrong == 0

    def forget_gpu(self) -> None:
        """Empty the engine's own prefix cache, and leave the tiers alone."""
        self.settle()
        assert self.scheduler.reset_prefix_cache()

    def administer(self, **command: Any) -> dict[str, Any]:
        """One command of cache administration, to its answer."""
        return self.answer(self.core.hotspan(command))  # type: ignore[attr-defined]

    def begin(self, **command: Any) -> Future[dict[str, Any]]:
        """One command of cache administration, whose answer has not come yet."""
        return self.core.hotspan(command)  # type: ignore[attr-defined, no-any-return]

    def answer(self, answer: Any) -> dict[str, Any]:
        """What came of a command; what it hands to the scheduler's thread is done here."""
        if isinstance(answer, Future):
            self.until(answer.done, self.administrator.run_waiting)
            return answer.result()
        return answer


class IdleCore:
    """vLLM's own loop of an engine core that has nothing to do, on a thread: it sleeps until its queue has something.

    Meanwhile the thread is the scheduler's, and the test must not step.
    """

    def __init__(self, engine: Core) -> None:
        self._engine = engine
        self._proc = EngineCoreProc.__new__(EngineCoreProc)
        self._proc.__dict__.update(engine.core.__dict__)
        self._proc.input_queue = queue.Queue()
        self._proc.output_queue = queue.Queue()
        self._proc.engines_running = False
        self._proc.process_input_queue_block = True
        self._proc.shutdown_state = EngineShutdownState.RUNNING
        self._thread = threading.Thread(target=self._proc._process_input_queue, name="idle-core", daemon=True)

    def __enter__(self) -> IdleCore:
        assert not self._proc.has_work(), "let it end what it has to do first: `settle`"
        self._thread.start()
        self._proc.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self._engine.until(self._proc.input_queue.empty, lambda: None)
        return self

    def __exit__(self, *_: object) -> None:
        self._proc.shutdown_state = EngineShutdownState.REQUESTED
        self._proc.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the idle core hangs"

    def call(self, method: str, *arguments: Any) -> Any:
        """A utility call, as the API server makes it, to its answer. Raises: AssertionError with what failed."""
        self._proc.input_queue.put((EngineCoreRequestType.UTILITY, (0, next(_numbers), method, arguments)))
        _, outputs = self._proc.output_queue.get(timeout=HANG_S)
        assert outputs.utility_output.failure_message is None, outputs.utility_output.failure_message
        return outputs.utility_output.result.result


@contextmanager
def core(
    model: Path,
    *,
    ram_gib: float = 0.01,
    disk: Path | None = None,
    l2: MemoryServer | None = None,
    cache: dict[str, Any] | None = None,
    clock: Clock | None = None,
    runner: type[KnownBytes] = KnownBytes,
    rank: int | None = None,
    **engine: Any,
) -> Iterator[Core]:
    """A running core over `model`; `cache`: fields of CacheSettings, `engine`: vLLM's arguments.

    l2:    shared with other cores, in this process's memory.
    clock: what connector, cache and tiers go by, instead of the machine's.
    runner: what stands in for the model.
    rank:   of a data-parallel replica.
    """
    settings = CacheOptions(ram_gib=ram_gib, disk=disk, disk_gib=0.05 if disk is not None else None).settings()
    settings = dataclasses.replace(
        settings, **({"patience_s": 10.0, "chunk_tokens": CHUNK, "is_served": True} | (cache or {}))
    )
    if l2 is not None:
        settings = dataclasses.replace(settings, l2=L2Settings("file:///memory"))
    options: dict[str, Any] = {
        "max_model_len": 4096,
        "block_size": BLOCK,
        "num_gpu_blocks_override": 96,
        "max_num_batched_tokens": STEP_TOKENS,
        "enforce_eager": True,
        "async_scheduling": False,
        "skip_tokenizer_init": True,
        "distributed_executor_backend": runner,
    }
    arguments = EngineArgs(
        str(model),
        **(options | engine),
        kv_transfer_config=transfer_config(settings),
        prefix_caching_hash_algo="sha256_cbor",
    )
    with ExitStack() as patches:
        if clock is not None:
            patches.enter_context(patch.object(opening, "SystemClock", lambda: clock))
        if l2 is not None:  # to the end: a tier that was given up opens its store again
            patches.enter_context(patch.object(opening, "open_store", lambda *url: l2.store()))
        with patch.object(engine_core, "freeze_gc_heap"):  # it looks at every object of the tests' process, for seconds
            config = arguments.create_engine_config()
            if rank is not None:  # as EngineCoreProc.run_engine_core does for a dense model
                config.parallel_config.data_parallel_index = rank
                config.kv_transfer_config.engine_id += f"_dp{rank}"
            running = EngineCore(config, runner, log_stats=True)
        try:
            yield Core(running)
        finally:
            with patch.object(engine_core, "cleanup_dist_env_and_memory"):  # there is none, and it takes a second
                running.shutdown()
