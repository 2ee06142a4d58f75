"""Adapters in vLLM: loaded, kept in slots, and given up only once nothing needs them any more.

What vLLM does by itself (read in 0.32): a request carries its adapter's path, and the worker loads what it has evicted,
least recently used first, when a step needs it (`LRUCacheWorkerLoRAManager.add_adapter`). So eviction is no concern
of ours, but an error in there ends the engine:
  - files that are gone. Nothing lets go of them before the last request with that path has ended (`unload`).
  - pins. The scheduler counts a batch's adapters against all slots, pinned or not, and the worker finds no slot for one
    too many. So requests wait here while the slots that are left are taken (`SlotGate`).
"""

import asyncio
import contextlib
import logging
import re
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import VLLMNotFoundError
from vllm.lora.request import LoRARequest

from hotspan.core.errors import EngineError
from hotspan.core.terms import tenant_label

if TYPE_CHECKING:
    from vllm.entrypoints.openai.models.serving import OpenAIServingModels
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)

_ENGINE_NAME = re.compile(r"(?P<name>.+)@[0-9a-f]{12}(-[0-9a-f]{16})?")
_GONE = "adapter {!r} was updated or deleted while this request was on its way: send it again"
_LOADING_FAILED = re.compile(r"^Call to \w+ method failed: ")


def engine_name(name: str, digest: str, owner: str = "") -> str:
    """What the engine calls an adapter: two contents, or two tenants' adapters, never share a name."""
    return f"{name}@{digest[:12]}" + (f"-{tenant_label(owner):016x}" if owner else "")


def registered_name(engine_name: str) -> str:
    """The name that the operator gave to what the engine calls `engine_name`; itself if it is none of ours."""
    found = _ENGINE_NAME.fullmatch(engine_name)
    return found["name"] if found else engine_name


class SlotGate:
    """Lets requests in as long as their adapters fit the slots that no other adapter is pinned in, in turn."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._users: Counter[str] = Counter()
        self._pinned: set[str] = set()
        self._turn = asyncio.Lock()
        self._left = asyncio.Event()

    async def enter(self, name: str) -> None:
        """Count a request of an adapter. Blocks: while there is no slot for it, or others were first."""
        if name not in self._pinned and (self._turn.locked() or not self._has_slot(name)):
            async with self._turn:
                await self._until(lambda: self._has_slot(name))
                self._users[name] += 1
            return
        self._users[name] += 1

    def leave(self, name: str) -> None:
        """A request has ended."""
        self._users[name] -= 1
        if not self._users[name]:
            del self._users[name]
        self._left.set()

    @contextlib.asynccontextmanager
    async def pinning(self, name: str) -> AsyncGenerator[None]:
        """Nobody enters meanwhile; the adapter counts as pinned afterwards. Blocks: until a slot can be spared."""
        async with self._turn:
            await self._until(lambda: len(self._unpinned() - {name}) < self._slots - len(self._pinned))
            yield
            self._pinned.add(name)

    def unpin(self, name: str) -> None:
        """The adapter is an adapter like others."""
        self._pinned.discard(name)
        self._left.set()

    async def drain(self, name: str) -> None:
        """Wait until no request of an adapter is left."""
        await self._until(lambda: not self._users[name])

    def check(self) -> None:
        """Raise AssertionError if a batch could need more slots than there are."""
        assert all(count > 0 for count in self._users.values())
        if self._pinned:
            assert len(self._pinned) < self._slots and len(self._unpinned()) <= self._slots - len(self._pinned)

    def _has_slot(self, name: str) -> bool:
        if not self._pinned or name in self._pinned:
            return True
        unpinned = self._unpinned()
        return name in unpinned or len(unpinned) < self._slots - len(self._pinned)

    def _unpinned(self) -> set[str]:
        return self._users.keys() - self._pinned

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._left.clear()
            await self._left.wait()


@dataclass(slots=True, eq=False)
class _Held:
    """An adapter that the engine may be asked for."""

    request: LoRARequest
    is_retired: bool = False


class EngineAdapters:
    """The adapters of one engine and of the app in front of it.

    grace_s: how long after an adapter was given up a request that had been told its name may still come with it.
    pin_s:   how long a pin may wait for a slot.
    """

    def __init__(
        self, client: "AsyncLLM", models: "OpenAIServingModels", *, grace_s: float = 10.0, pin_s: float = 30.0
    ) -> None:
        lora = client.vllm_config.lora_config
        if lora is None:
            raise EngineError("the engine was started without --enable-lora: it takes no adapters")
        self.slots: int = lora.max_loras
        self.max_rank: int = lora.max_lora_rank
        self._client = client
        self._models = models
        self._grace_s = grace_s
        self._pin_s = pin_s
        self._held: dict[str, _Held] = {}
        self._gate = SlotGate(self.slots)
        self._count_requests()

    @property
    def is_dead(self) -> bool:
        return bool(self._client.errored) and not self._client.is_running

    def has(self, name: str) -> bool:
        """Whether a name is the base model's, or an adapter's that the server was started with (--lora-modules)."""
        is_adapter = name in self._models.lora_requests and name not in self._held
        return self._models.is_base_model(name) or is_adapter

    def name_of(self, name: str, digest: str, owner: str) -> str:
        """What the engine calls an adapter of this name, content and owner."""
        return engine_name(name, digest, owner)

    async def load(self, engine_name: str, path: Path) -> None:
        """Load an adapter, and let requests name it. Blocks: the engine, while it reads. Raises: EngineError."""
        held = self._held.get(engine_name)
        if held is None:
            held = _Held(LoRARequest(engine_name, self._models.lora_id_counter.inc(1), str(path)))
        held.is_retired = False
        try:
            await self._client.add_lora(held.request)
        except Exception as error:  # the engine's answer is of no type
            await self._forget(held)  # vLLM keeps the slot of what it could load and not apply
            raise EngineError(_LOADING_FAILED.sub("", str(error).strip() or repr(error))) from error
        self._held[engine_name] = held
        self._models.lora_requests[engine_name] = held.request
        logger.info("adapter_loaded name=%s", engine_name)

    async def pin(self, engine_name: str) -> None:
        """Keep a loaded adapter in its slot. Raises: EngineError if none can be spared in time."""
        held = self._held[engine_name]
        try:
            async with asyncio.timeout(self._pin_s), self._gate.pinning(engine_name):
                await self._client.add_lora(held.request)  # it may have been evicted
                await self._client.pin_lora(held.request.lora_int_id)
        except TimeoutError as error:
            raise EngineError(f"requests of other adapters held all slots for {self._pin_s:g} s: try again") from error
        except Exception as error:  # the engine's answer is of no type
            raise EngineError(_LOADING_FAILED.sub("", str(error).strip() or repr(error))) from error

    async def unpin(self, engine_name: str) -> None:
        """Let a pinned adapter be evicted again. vLLM can only remove it; its next request brings it back."""
        await self._forget(self._held[engine_name])
        self._gate.unpin(engine_name)

    async def unload(self, engine_name: str) -> None:
        """Give up an adapter that is not pinned, unless it is loaded again meanwhile.

        Blocks: until its requests have ended, those too that are still on their way here.
        """
        held = self._held.get(engine_name)
        if held is None:
            return
        held.is_retired = True
        await asyncio.sleep(self._grace_s)
        if not self._is_given_up(held):
            return
        self._models.lora_requests.pop(engine_name, None)
        await self._gate.drain(engine_name)
        if not self._is_given_up(held):
            return
        del self._held[engine_name]
        await self._forget(held)
        logger.info("adapter_unloaded name=%s", engine_name)

    def publish(self, names: Callable[[], Iterable[str]]) -> None:
        """Let /v1/models and answers say the adapters' registered names, loaded or not. Mutates: the app's models."""
        from hotspan.engine.entrypoints import ModelCard, ModelList, ModelPermission

        models, model_name = self._models, self._models.model_name

        async def show_available_models() -> ModelList:
            shown = await models.registry.show_available_models()
            static = [name for name in models.lora_requests if name not in self._held]
            for name in (*static, *names()):
                shown.data.append(ModelCard(id=name, parent=model_name(), permission=[ModelPermission()]))
            return shown

        models.show_available_models = show_available_models
        models.model_name = lambda lora_request=None: registered_name(model_name(lora_request))

    # -- inside ----------------------------------------------------------------------------------------------------

    def _count_requests(self) -> None:
        """Know which adapters' requests the engine has. Mutates: the client."""
        for method in ("generate", "encode"):
            setattr(self._client, method, self._counted(getattr(self._client, method)))

    def _counted(self, ask: Callable[..., AsyncGenerator[Any]]) -> Callable[..., AsyncGenerator[Any]]:
        @wraps(ask)
        def counted(*rest: Any, lora_request: LoRARequest | None = None, **options: Any) -> AsyncGenerator[Any]:
            answers = ask(*rest, lora_request=lora_request, **options)
            return answers if lora_request is None else self._within(lora_request, answers)

        return counted

    async def _within(self, lora: LoRARequest, answers: AsyncGenerator[Any]) -> AsyncGenerator[Any]:
        name = lora.lora_name
        async with contextlib.aclosing(answers):
            await self._gate.enter(name)
            try:
                if name not in self._held and name not in self._models.lora_requests:
                    raise VLLMNotFoundError(_GONE.format(registered_name(name)))
                async for answer in answers:
                    yield answer
            finally:
                self._gate.leave(name)

    def _is_given_up(self, held: _Held) -> bool:
        """Whether it still has to go: nobody loaded it again, and nobody else has seen to it."""
        return held.is_retired and self._held.get(held.request.lora_name) is held

    async def _forget(self, held: _Held) -> None:
        """Make the engine drop an adapter's weights."""
        try:
            await self._client.remove_lora(held.request.lora_int_id)
        except Exception as error:  # the engine's answer is of no type
            logger.warning("adapter_not_removed name=%s: %s", held.request.lora_name, error)
