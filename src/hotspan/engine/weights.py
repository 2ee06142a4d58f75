"""Weights that change while the engine runs: whatever may change them ends the namespace of the cache before it runs.

    RPC to the workers -> harmless? run it
                       -> end the namespace, run it, and then
                            nothing more is on its way  -> a namespace that nobody else has, or that of the files
                            an update goes on, or sleep -> none until that has ended

All that reaches the workers passes the executor's `collective_rpc` in the engine core's process: the utility calls of
servers and of `LLM()`, what engine and executor do by themselves, and what a program calls on the executor.
"""

import logging
import secrets
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, Protocol

from hotspan.core.clock import Clock
from hotspan.core.threads import start
from hotspan.engine.written import WrittenModel

logger = logging.getLogger(__name__)

NAME_BYTES: Final = 32

HARMLESS: Final = frozenset(
    {
        # Each step, and what is asked about it.
        *("execute_model", "sample_tokens", "take_draft_token_ids", "execute_dummy_batch", "synchronize_device"),
        *("check_health", "handle_ft_command"),
        # Caches and adapters: `add_lora` is looked at by itself.
        *("reset_mm_cache", "reset_encoder_cache", "release_late_interaction_query_cache"),
        *("remove_lora", "list_loras", "pin_lora"),
        # What is read.
        *("get_supported_tasks", "get_kv_cache_spec", "get_supported_kv_cache_layouts", "get_model_inspection"),
        *("get_kv_connector_handshake_metadata", "get_cache_block_size_bytes", "get_compilation_match_table"),
        *("get_encoder_timing_stats", "compute_weight_checksums", "supports_draft_weight_updates", "vocab_size"),
        "get_simple_cpu_offload_num_cpu_blocks",
        *("save_sharded_state", "save_tensorized_model", "profile", "annotate_profile"),
        # The start and the end of an engine.
        *("determine_available_memory", "set_kv_cache_layout", "initialize_from_config", "compile_or_warm_up_model"),
        *("update_max_model_len", "shutdown"),
        # A trainer's connection.
        *("init_weight_transfer_engine", "shutdown_weight_transfer_engine"),
    }
)
"""Methods of vLLM's workers that leave the weights as they are. What is not here, whoever wrote it, may change them."""

_BEGINS_UPDATE: Final = ("start_weight_update", "start_draft_weight_update")
_IN_UPDATE: Final = "update_weights"
_ENDS_UPDATE: Final = ("finish_weight_update", "reload_weights")
_KNOWN: Final = frozenset(
    {*_BEGINS_UPDATE, _IN_UPDATE, *_ENDS_UPDATE, "sleep", "wake_up", "discard", "reset_weights", "load_weights"}
)
"""Methods that change weights and nothing else: behind any other, files alone do not tell what the engine has."""

_MOVES: Final = ("sleep", "wake_up", "discard")
"""Methods that leave the weights what they are, and may leave them elsewhere."""

_KV_ONLY: Final = frozenset({"kv_cache", "scheduling"})

Asked = Callable[[], Any]


class Cache(Protocol):
    """What has the namespace: engine/manager.py."""

    def end_namespace(self, nobody: bytes | None, *, forget: bool) -> None: ...

    def begin_namespace(self, namespace: bytes, *, source: str) -> None: ...

    def load_adapter(self, lora: Any, *, anew: bool) -> None: ...

    def unload_adapter(self, adapter_id: int) -> None: ...

    def reset_outputs(self) -> None: ...

    @property
    def named_requests(self) -> int: ...


class Files(Protocol):
    """What names the weights by their files: engine/checkpoint.py."""

    def before(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], bytes | None] | None: ...

    def reloaded(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True)
class WeightsState:
    """What is told of an engine's weights.

    source:  where the name of the namespace is from: start, files, random; None while nothing is cached.
    changes: since the start. last: the method that may have changed them. at_s: when it ended or began (Unix).
    """

    source: str | None
    changes: int
    last: str | None
    at_s: float

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, "changes": self.changes, "last": self.last, "at": self.at_s}


class WeightsWatch:
    """Follows what the workers of one engine are asked for. The scheduler's thread calls it.

    cache: whose namespace ends and begins. files: None if files never tell what this engine has.
    later: has a function called soon on the scheduler's thread, from any thread.
    is_in_program: whether a program may have the model, in this process.
    draw:  random bytes.
    """

    def __init__(
        self,
        cache: Cache,
        files: Files | None,
        later: Callable[[Callable[[], None]], None],
        clock: Clock,
        *,
        is_private: bool = False,
        draw: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._cache = cache
        self._files = files
        self._later = later
        self._clock = clock
        self._draw = draw
        self.is_in_program = False
        self._is_private = is_private  # the current name is nobody else's
        self._named = 0  # requests, when it began
        self._depth = 0
        self._source: str | None = "start"
        self._changes = 0
        self._last: str | None = None
        self._at_s = clock.unix()
        self._is_updating = self._is_asleep = False
        self.is_bound = False
        self._written: WrittenModel | None = None  # of a program that has the model in its own process

    @property
    def state(self) -> WeightsState:
        """As of now."""
        return WeightsState(self._source, self._changes, self._last, self._at_s)

    def bind(self, executor: Any) -> None:
        """Follow an executor from now on. Mutates: it, and a model of this process that it has."""
        asked = executor.collective_rpc

        def collective_rpc(method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, **how: Any) -> Any:
            return self.call(
                method, tuple(args or ()), kwargs or {}, lambda: asked(method, timeout, args, kwargs, **how)
            )

        executor.collective_rpc = collective_rpc
        self.is_bound = True
        worker = getattr(getattr(executor, "driver_worker", None), "worker", None)
        try:
            if worker is not None:
                self._follow_model(model := worker.get_model())
                self._written = WrittenModel(model) if self.is_in_program else None
        except Exception as error:  # the engine may have no model yet: it is loaded by an RPC then
            logger.info("model_not_followed error=%s", error)

    def look(self) -> None:
        """End the namespace if somebody wrote into the model without any call. Before a request, and in each step."""
        if self._written is None or self._depth:
            return
        try:
            if self._written.changed():
                self.call("a write into the model", (), {}, lambda: None)
        except Exception as error:  # nobody knows what the weights are then
            self._written = None
            logger.error("model_not_followed error=%s: nothing is cached any more", error)
            self._end("a model that can't be looked at")
            self._is_updating = True

    def require_bound(self) -> None:
        """Cache nothing in an engine that nobody told us to follow."""
        if not self.is_bound and self._source is not None:
            logger.error("engine_not_followed: nothing is cached, for its weights may change unseen; please report it")
            self._end("an engine that is not followed")

    def call(self, method: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Asked) -> Any:
        """Run what the workers are asked for, and end the namespace before if that may change weights."""
        name = method if isinstance(method, str) else "a function"
        if name == "add_lora" and not self._depth:
            return self._load_adapter(args, kwargs, run)
        if self._depth or self._is_harmless(name, args, kwargs):
            if name in _MOVES:
                self.look()
            result = run()
            if name in _MOVES:
                self._seen()
            if name == "remove_lora":
                self._cache.unload_adapter(args[0] if args else kwargs["lora_id"])
            elif name == "reset_encoder_cache":
                self._cache.reset_outputs()
            return result
        self._end(name)
        if name not in _KNOWN:
            self._files = None
        naming = self._files.before(args, kwargs) if self._files is not None and name == "reload_weights" else None
        self._depth += 1
        try:
            result = run()
        except BaseException:
            self._begin_unless_closed()
            raise
        finally:
            self._depth -= 1
            self._seen()
        if self._files is not None and name == "reload_weights":
            self._files.reloaded(args, kwargs)
        self._note(name, args, kwargs)
        if isinstance(result, Future):
            number = self._changes
            result.add_done_callback(lambda done: self._later(lambda: self._end_async(number)))
        elif naming is not None and not (self._is_updating or self._is_asleep):
            self._read(naming)
        else:
            self._begin_unless_closed()
        return result

    # -- inside ----------------------------------------------------------------------------------------------------

    def _seen(self) -> None:
        """What was written until now is what a call did."""
        if self._written is not None:
            self._written.changed()

    def _is_harmless(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if name in HARMLESS:
            return True
        if name == "sleep":  # level 1 keeps the weights in host memory
            return _argument(args, kwargs, "level", 1) == 1
        if name == "wake_up":
            return not self._is_asleep
        if name == "discard":
            return _is_kv_only(_argument(args, kwargs, "tags", None))
        return False

    def _note(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Whether weights are on their way still."""
        if name in _BEGINS_UPDATE:
            self._is_updating = True
        elif name in _ENDS_UPDATE:
            self._is_updating = False
        elif name in ("sleep", "discard"):
            self._is_asleep = True
        elif name == "wake_up" and not _is_kv_only(_argument(args, kwargs, "tags", None)):
            self._is_asleep = False

    def _end(self, method: str) -> None:
        """End the namespace. A name under which nothing was kept is taken again: calls may come by the hundred."""
        is_unused = self._source is None or (self._is_private and self._cache.named_requests == self._named)
        self._cache.end_namespace(None if is_unused else self._draw(NAME_BYTES), forget=self._is_private)
        self._is_private = True
        self._changes += 1
        self._last, self._at_s, self._source = method, self._clock.unix(), None
        log = logger.debug if is_unused else logger.warning
        log("weights_may_change method=%s: what was cached is not used, and nothing is cached meanwhile", method)

    def _begin_unless_closed(self) -> None:
        if not (self._is_updating or self._is_asleep):
            self._begin(self._draw(NAME_BYTES), "random")

    def _begin(self, namespace: bytes, source: str) -> None:
        self._cache.begin_namespace(namespace, source=source)
        self._is_private = source == "random"
        self._named = self._cache.named_requests
        self._source, self._at_s = source, self._clock.unix()
        logger.info("weights_named method=%s source=%s namespace=%s", self._last, source, namespace.hex()[:16])

    def _end_async(self, number: int) -> None:
        """What the workers did beside the engine's steps has ended: so has what these steps computed."""
        self._seen()
        if number == self._changes:
            self._end(self._last or "")
            self._begin_unless_closed()

    def _read(self, naming: Callable[[], bytes | None]) -> None:
        """Have the files' digest taken on a thread, and the namespace begin then."""
        number = self._changes

        def named(namespace: bytes | None) -> None:
            if number != self._changes:
                return  # they may have changed again
            if namespace is None:
                self._begin_unless_closed()
            else:
                self._begin(namespace, "files")

        def read() -> None:
            found = naming()
            self._later(lambda: named(found))

        start("weights", read, failed=lambda error: self._later(lambda: named(None)))

    def _load_adapter(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], run: Asked) -> Any:
        """An adapter's name is its content: only what was computed with it under another one ends."""
        lora = args[0] if args else kwargs["lora_request"]
        self._cache.load_adapter(lora, anew=bool(getattr(lora, "load_inplace", False)))
        return run()

    def _follow_model(self, model: Any) -> None:
        """Programs that have the model in their own process load weights into it without any RPC."""
        watch = weakref.ref(self)
        for name in ("load_weights", "load_state_dict"):
            load = getattr(model, name, None)
            if callable(load):
                setattr(model, name, _followed(watch, load))


def _followed(watch: "weakref.ref[WeightsWatch]", load: Callable[..., Any]) -> Callable[..., Any]:
    def followed(*args: Any, **kwargs: Any) -> Any:
        found = watch()
        if found is None:
            return load(*args, **kwargs)
        return found.call("load_weights", (), {}, lambda: load(*args, **kwargs))

    return followed


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, default: Any) -> Any:
    """A method's first argument."""
    return args[0] if args else kwargs.get(name, default)


def _is_kv_only(tags: Any) -> bool:
    """Whether memory is named that has no weights; without tags all of it is meant."""
    return isinstance(tags, list | tuple | set | frozenset) and bool(tags) and _KV_ONLY.issuperset(tags)
