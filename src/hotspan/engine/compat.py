"""What hotspan takes from inside vLLM, and what of it differs from release to release, in one place.

`check_engine` says at the start if the installed vLLM is not what hotspan was built for; engine/contract.py lists what
that is, and tests/engine/test_compat.py reads the sources of each release for it.

0.26   A request's context has no room for state of ours, and its last chunks are stored after `on_request_finished`
       (HotspanManager.forget_ended). Until 0.28 block hashes start from a random number of each process
       (`fix_hash_seed`), and the layout of the KV cache is no part of the configuration (`kv_layout`). Until 0.29 a
       request that ends is stored beyond what was computed (`cap_last_store`), and KV cache groups have no ids
       (`offloaded_groups`). Until 0.31 utility calls ask one engine core only (`ask_cores`).
0.27   The context has room (`keep_state`), and `on_request_finished` comes after the last store.
0.28   The CUDA worker's region: `create_next_view` is called `create_next_worker_view` (engine/cuda.py).
       `create_error_response` moved (engine/entrypoints.py).
0.29   Hashes start from a fixed seed. KVCacheConfig and CacheConfig have `kv_cache_layout`. The API server's modules
       moved.
0.30   Groups have ids. The CUDA worker's `num_cpu_blocks` is called `num_cpu_chunks`.
0.31   The manager is not `touch`ed any more, of which hotspan made no use. The region has `pinned_addresses`.
0.32   `get_load_source`, `call_utility_all_async`, `host_unregister`.
0.33   `submit_load(..., expedited=False)`, taken by **kwargs. The region has `cpu_page_size` and `page_size`. With a
       draft model a block's hash covers some tokens after it (`block_hasher`). A manager has a `lock` (one thread calls
       ours: none is needed) and `on_reset_flushed` (our connector counts for itself). The command line's module moved.
"""

import asyncio
import inspect
import multiprocessing
import sys
import weakref
from collections.abc import Callable
from enum import StrEnum
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from vllm import envs
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading import scheduler as offloading
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name, sha256_cbor
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.engine import core as engine_core
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.request import Request

from hotspan.config.environment import environment
from hotspan.core.errors import EngineError
from hotspan.engine.contract import ENGINE, METHODS, SUPPORTED, check_version, engine_version, overrides

if ENGINE >= (0, 32):
    from vllm.v1.metrics.cache_hit_source import CacheHitSource as CacheHitSource
else:

    class CacheHitSource(StrEnum):  # type: ignore[no-redef]
        """Of a vLLM that does not ask where a hit came from."""

        HOST = "host"
        DISK = "disk"
        EXTERNAL_UNSPECIFIED = "external_unspecified"


_State = TypeVar("_State")

_SEED = "vllm-none-hash"
"""What vLLM itself starts its hashes from, since 0.29."""


class OffloadedGroup(NamedTuple):
    """A KV cache group whose chunks go to the tiers."""

    index: int  # type: ignore[assignment]
    tokens_per_block: int


def keep_state(context: ReqContext, state: object) -> None:
    """Keep something of ours with a request, for as long as the engine asks about it."""
    if ENGINE >= (0, 27):
        context.set_state(state)
    else:
        context.hotspan = state


def kept_state(context: ReqContext, kind: type[_State]) -> _State | None:
    """What was kept with a request; None if nothing was."""
    return context.get_state(kind) if ENGINE >= (0, 27) else getattr(context, "hotspan", None)


def offloaded_groups(config: OffloadingConfig) -> list[OffloadedGroup]:
    """The groups by their index in the engine's KV cache configuration."""
    return [
        OffloadedGroup(group.group_id if ENGINE >= (0, 30) else n, group.tokens_per_block)
        for n, group in enumerate(config.groups)
    ]


def cap_last_store(scheduler: OffloadingConnectorScheduler, request: Request) -> None:
    """A request ends: let no chunk of it be stored that was not computed to its end.

    Before 0.30 that would be one that ends with the last token of an answer, which was sampled and never fed back; in
    0.26 also the rest of a prompt that was aborted, for which there are no blocks, and the engine would end.
    """
    state = scheduler._req_status.get(request.request_id)
    if ENGINE >= (0, 30) or state is None:
        return
    computed = min(max(request.num_prompt_tokens, request.num_tokens - 1), request.num_computed_tokens)
    asked = state.max_offload_tokens
    state.max_offload_tokens = computed if asked is None else min(asked, computed)


def skip_unchanged_keys() -> None:
    """Let vLLM derive a request's keys only if a chunk was completed since it last did.

    It does so for each request in each step, and goes through all of the request's block hashes for it: with 256
    requests of 32k tokens that takes 2 ms per step (benchmarks/results/step-cost.json). A release in which that looks
    different is left as it is.
    """
    state = getattr(offloading, "RequestOffloadState", None)
    derive = getattr(state, "update_offload_keys", None)
    fields = getattr(getattr(offloading, "GroupOffloadConfig", None), "_fields", ())
    if derive is None or "hashes_per_chunk" not in fields or hasattr(derive, "__wrapped__"):
        return

    @wraps(derive)
    def update_offload_keys(self: Any) -> None:
        hashes = len(self.req.block_hashes)
        for group, known in zip(self.config.kv_group_configs, self.group_states, strict=True):
            if hashes >= group.hashes_per_chunk * (len(known.offload_keys) + 1):
                derive(self)
                return

    state.update_offload_keys = update_offload_keys  # type: ignore[union-attr]


def kv_layout(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """The order of a block's axes in memory, and what else decides it and is not configured."""
    if ENGINE >= (0, 29):
        return str(kv_cache_config.kv_cache_layout or vllm_config.cache_config.kv_cache_layout)
    asked = envs.VLLM_KV_CACHE_LAYOUT or OffloadingConnector.get_required_kvcache_layout(vllm_config)
    # The attention backend may order more axes than it is asked to, and the workers choose it by the device.
    return str(asked) if current_platform.is_cpu() else f"{asked} {current_platform.get_device_name()}"


def hash_seed() -> str:
    """What the engine's chain of block hashes starts from."""
    if ENGINE >= (0, 29):
        return kv_cache_utils.resolve_none_hash_seed(sha256_cbor)
    return environment().get("PYTHONHASHSEED", _SEED)


def fix_hash_seed() -> None:
    """Let hashes mean the same in every process. Call before the engine's core is complete: it starts the chain then.

    Before 0.29 a process without PYTHONHASHSEED takes a random number, and finds nothing that another one has kept.
    """
    start = engine_core.init_none_hash
    if ENGINE >= (0, 29) or hasattr(start, "is_fixed"):
        return

    def init_none_hash(function: Callable[[Any], bytes]) -> None:
        start(function)
        kv_cache_utils.NONE_HASH = kv_cache_utils.BlockHash(function(hash_seed()))

    init_none_hash.is_fixed = True  # type: ignore[attr-defined]
    engine_core.init_none_hash = init_none_hash


def is_engine_core() -> bool:
    """Whether this process is an engine core's own: no program that uses the engine is in it."""
    return multiprocessing.current_process().name.startswith("EngineCore")


async def ask_cores(client: Any, method: str, *arguments: Any) -> list[Any]:
    """What each engine core of a client answers to a utility call."""
    if ENGINE >= (0, 32):
        return list(await client.call_utility_all_async(method, *arguments))
    asked = [client._call_utility_async(method, *arguments, engine=core) for core in client.core_engines]
    return list(await asyncio.gather(*asked))


def offer_utility(name: str, function: Callable[..., Any]) -> None:
    """Let the engine's clients call `function(core, *arguments)` on the scheduler's thread, between two steps.

    vLLM looks utility methods up by name on its core; a Future is answered when it is done.
    """
    setattr(EngineCore, name, function)


class CoreCalls:
    """Has `function` called soon on the engine core's own thread, which may be idle: it sleeps on its input queue.

    In an engine without a process of its own there is no such queue; then `function` runs with the next step.
    """

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self._is_waiting = False
        _watch_cores()

    def knock(self) -> None:
        """From any thread: have it called. What knocks before it is called is one call."""
        core = _core() if _core is not None else None
        if core is not None and not self._is_waiting:
            self._is_waiting = True
            core.input_queue.put_nowait((self, None))

    def answer(self) -> None:
        """On the core's thread."""
        self.heard()
        self._function()

    def heard(self) -> None:
        """What was knocked for is being done: who knocks from now on has it called again."""
        self._is_waiting = False


_core: "weakref.ref[EngineCoreProc] | None" = None
"""The engine core of this process, once it was asked for anything."""


def _watch_cores() -> None:
    """Let the engine core take calls from its queue, and know it by what it takes. Mutates: vLLM's class, once."""
    handle = EngineCoreProc._handle_client_request
    if hasattr(handle, "is_watched"):
        return

    def handled(self: EngineCoreProc, request_type: Any, request: Any) -> None:
        global _core
        if _core is None or _core() is not self:
            _core = weakref.ref(self)
        if isinstance(request_type, CoreCalls):
            request_type.answer()
        else:
            handle(self, request_type, request)

    handled.is_watched = True  # type: ignore[attr-defined]
    EngineCoreProc._handle_client_request = handled


_init_aggregator = Executor.init_kv_output_aggregator


def watch_executors(ready: Callable[[Any, Any], None]) -> None:
    """Call `ready(executor, connector)` when an engine core has made its scheduler, which has the connector.

    Only the last caller is told.
    """

    @wraps(_init_aggregator)
    def init_kv_output_aggregator(executor: Executor, connector: Any) -> None:
        ready(executor, connector)
        _init_aggregator(executor, connector)

    Executor.init_kv_output_aggregator = init_kv_output_aggregator


_shutdown = EngineCore.shutdown


def watch_ends(ending: Callable[[Any], None]) -> None:
    """Call `ending(core)` before an engine core without a process of its own shuts down. Only the last caller is told.

    One with a process of its own steps until its connector has no more to do; the other is never stepped again.
    """

    @wraps(_shutdown)
    def shutdown(core: EngineCore) -> None:
        if not isinstance(core, EngineCoreProc):
            ending(core)
        _shutdown(core)

    EngineCore.shutdown = shutdown


def watch_runners(ready: Callable[[Any], None]) -> None:
    """Call `ready(runner)` when a CPU engine's model runner of this process has its KV cache, before its first step.

    Only the last caller is told.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner  # not to be imported on other platforms

    made = getattr(CPUModelRunner.initialize_kv_cache, "__wrapped__", CPUModelRunner.initialize_kv_cache)

    @wraps(made)
    def initialize_kv_cache(runner: Any, *given: Any, **named: Any) -> None:
        made(runner, *given, **named)
        if not (named.get("is_profiling") or any(given[1:2])):
            ready(runner)

    CPUModelRunner.initialize_kv_cache = initialize_kv_cache


def extra_keys(request: Request, start: int, stop: int) -> list[tuple[Any, ...] | None] | None:
    """What else than its tokens names a block of a request, as the engine's events say it of each of theirs."""
    found, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)  # until 0.31 they are not tagged
    said: list[tuple[Any, ...] | None] | None = untagged([found])
    return said


def block_hasher(vllm_config: VllmConfig, hash_tokens: int) -> Callable[..., Any]:
    """What the engine names blocks with: for texts that are not about to run."""
    function = get_hash_fn_by_name(vllm_config.cache_config.prefix_caching_hash_algo)
    if ENGINE >= (0, 33):
        return get_request_block_hasher(hash_tokens, function, vllm_config.num_hash_lookahead_tokens)
    return get_request_block_hasher(hash_tokens, function)


def check_engine(*classes: type) -> None:
    """Raise EngineError if the installed vLLM is not one that hotspan was built for.

    classes: of hotspan's, whose overrides are compared, too.
    """
    found = engine_version()
    check_version(found)
    for method in (*METHODS, *(each for ours in classes for each in overrides(ours))):
        owner = sys.modules.get(method.module)
        if owner is None or not method.is_in(ENGINE):
            continue  # of the API server, or of CUDA: this process has not loaded it
        function: Any = owner
        for name in method.name.split("."):
            function = getattr(function, name, None)
        have = tuple(inspect.signature(function).parameters) if callable(function) else ()
        if function is None or not set(method.parameters) <= set(have):
            low, high = (".".join(map(str, part)) for part in SUPPORTED)
            raise EngineError(
                f"vLLM {found} has another {method.name}{have} than hotspan was built for (it needs"
                f" {method.parameters}): install a vLLM that is released, from {low} on and below {high}"
            )
