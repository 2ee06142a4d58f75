"""vLLM's executor over ranks with a simulated device each: their model's steps are kernels that run behind the host."""

from __future__ import annotations

import copy
import pickle
import random
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from numpy.lib.stride_tricks import as_strided
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput

from hotspan.engine.contract import ENGINE
from kit.cuda.clocks import Clock
from kit.cuda.machine import Device, Machine
from kit.cuda.streams import Event, Kernel

from ..harness.runner import KnownBytes, Row
from .kinds import WINDOW, Kind

_STEP = 0x9E3779B97F4A7C15
_COMPARED = 0.2
"""Of the steps that compute one token of a request, how many compare all that was before; of others all do."""


if ENGINE >= (0, 29):
    from vllm.v1.kv_cache_interface import group_kernel_blocks
    from vllm.v1.worker.utils import allocate_kv_cache
else:

    def group_kernel_blocks(cache: Any, num_blocks: int) -> Any:
        """A layer's cache by blocks."""
        return cache[0] if isinstance(cache, list) else cache


class Layer:
    """A layer's part of a device's memory: uint8[blocks, tokens of a block, bytes of a token]."""

    def __init__(self, device: Device, tensor: Any, spec: Any, number: int, blocks: int) -> None:
        view = group_kernel_blocks(tensor, blocks)
        page = spec.page_size_bytes
        stride = view.stride(0) * view.element_size() if isinstance(spec, AttentionSpec) else page
        start = view.data_ptr() - device.address
        self.spec, self.number = spec, number
        per_token = page // spec.block_size
        memory = device.memory[start:]
        self.tokens = as_strided(memory, (blocks, spec.block_size, per_token), (stride, per_token, 1))
        self.pages = as_strided(memory, (blocks, page), (stride, 1))
        self.place = (start, stride, blocks)

    def bytes_of(self, kv: Any, width: int) -> Any:
        """What tokens have here: uint8[tokens, width], from a number for each."""
        own = kv ^ np.uint64(self.number * _STEP & (1 << 64) - 1)
        return np.tile(own[:, None].view(np.uint8), (1, -(-width // 8)))[:, :width]


class Rank(KnownBytes):
    """One rank. `wrong` and `read` count what its kernels found, when its stream came to them.

    has_graphs: its kernels are a graph's: they find the step's blocks in buffers of the device, which stay where they
                are. The host writes the next step's into one pinned buffer, from which the stream copies them.
    """

    kind: Kind
    device: Device
    has_graphs: bool = False

    def _init_executor(self) -> None:
        super()._init_executor()
        self.rank = self.vllm_config.parallel_config.rank
        self._pinned: list[Any] = []
        self._static: list[Any] = []
        self._copied: Event | None = None
        self._drafts: dict[str, list[int]] = {}
        self._begun: set[str] = set()
        self.accepted = self.rejected = 0

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        (config,) = configs
        device = self.device
        self._groups = [group.kv_cache_spec for group in config.kv_cache_groups]
        self._block = self._groups[0].block_size

        caches = self._allocate(config)
        numbers = {name: n for n, name in enumerate(caches)}
        base = 0 if self.kind.is_replicated else self.rank * len(numbers)
        self._layers = [
            [
                Layer(device, caches[name], group.kv_cache_spec, base + numbers[name], config.num_blocks)
                for name in group.layer_names
            ]
            for group in config.kv_cache_groups
        ]
        device.blocks = [layer.place for layers in self._layers for layer in layers]
        self.connector = KVConnectorFactory.create_connector(self.vllm_config, KVConnectorRole.WORKER, config)
        self.connector.register_kv_caches(caches)

    def _allocate(self, config: KVCacheConfig) -> dict[str, Any]:
        """Each layer's KV cache in the device's memory, as this release's model runner makes it."""
        if ENGINE >= (0, 29):

            def zeros(size: int, **_: Any) -> torch.Tensor:
                return torch.frombuffer(self.device.allocate(size), dtype=torch.int8)

            with patch.object(torch, "zeros", zeros):
                layout = self.cache_config.get_resolved_kv_cache_layout()
                return dict(allocate_kv_cache(config, torch.device("cpu"), layout))
        memory = self.device.allocate(sum(tensor.size for tensor in config.kv_cache_tensors))
        specs = {name: group.kv_cache_spec for group in config.kv_cache_groups for name in group.layer_names}
        caches, start = dict[str, Any](), 0
        for tensor in config.kv_cache_tensors:
            found = torch.frombuffer(memory, dtype=torch.int8, count=tensor.size, offset=start)
            view = found.view(config.num_blocks, -1)
            listed = (name for name in tensor.shared_by if ENGINE < (0, 27) and isinstance(specs[name], MambaSpec))
            caches |= dict.fromkeys(tensor.shared_by, view) | {name: [view] for name in listed}
            start += tensor.size
        return caches

    def step(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """What a GPU's model runner does in a step, in its order; kernels are launched and not waited for."""
        self.steps += 1
        connector = self.connector
        connector.handle_preemptions(output.kv_connector_metadata)
        connector.bind_connector_metadata(output.kv_connector_metadata)
        begins_with_loads = getattr(output, "has_sync_kv_loads", True)
        if begins_with_loads:
            connector.start_load_kv(None)
        sampled = self._compute(output)
        if not begins_with_loads:
            connector.start_load_kv(None)
        connector.wait_for_save()
        told = KVConnectorOutput()
        self._tell(told, output.finished_req_ids)
        told.invalid_block_ids = connector.get_block_ids_with_load_errors()
        told.kv_connector_stats = connector.get_kv_connector_stats()
        told.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        names = list(output.num_scheduled_tokens)
        result = ModelRunnerOutput(names, {name: n for n, name in enumerate(names)}, [sampled[name] for name in names])
        result.kv_connector_output = told
        return result

    def _tell(self, told: KVConnectorOutput, ended: set[str]) -> None:
        """Which requests' transfers have ended."""
        if ENGINE < (0, 30):
            told.finished_sending, told.finished_recving = self.connector.get_finished(ended)
            return
        results = self.connector.get_transfer_results(ended)
        told.finished_sending, told.finished_recving = results.finished_sending, results.finished_recving
        told.failed_recving = results.failed_recving

    def _compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        self._checks: list[Callable[[], None]] = []
        self._tables: list[Any] = []
        self._reads, self._writes = set[int](), set[int]()
        self._drafts = dict(output.scheduled_spec_decode_tokens)
        self._begun = {each.req_id for each in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        if output.new_block_ids_to_zero:
            self._zero(list(output.new_block_ids_to_zero))
        if copies := output.kv_cache_block_copies:
            self._duplicate([each.src_block_id for each in copies], [each.dst_block_id for each in copies])
        sampled = super()._compute(output)
        if self._checks:
            if self.has_graphs:
                self._fill_buffers()
            self.device.launch(self._checks, self._reads, self._writes, "a forward pass")
        return sampled

    def _await_buffers(self) -> None:
        """The host may write into the pinned buffer: the last step's copy of it has been made."""
        if self._copied is not None:
            self._copied.synchronize()

    def _fill_buffers(self) -> None:
        """The step's blocks go to the device, as vLLM's model runner sends them."""
        self._await_buffers()
        self._pinned[:] = self._tables
        self.device.call("cudaMemcpyAsync")

        def copied() -> None:
            self._static[:] = self._pinned

        self.device.compute.submit(Kernel(copied))
        self._copied = Event(self.device)
        self._copied.record(self.device.compute)

    def _table(self, blocks: Any) -> Callable[[], Any]:
        """Where a kernel finds the blocks of its tokens; it may find another step's."""
        place = len(self._tables)
        self._tables.append(blocks)
        if not self.has_graphs:
            return lambda: blocks
        return lambda: self._static[place] if place < len(self._static) else None

    def _run(self, name: str, computed: int, count: int) -> list[int]:
        """As the base does; of a step with drafts, as many as are what would have been sampled.

        With asynchronous scheduling the scheduler does not know yet how many drafts of the step before were rejected:
        it takes all for computed, and the rank's own drafts are in the places that it keeps for them.
        """
        drafts, row = self._drafts.get(name), self._rows[name]
        if self.scheduler_config.async_scheduling:
            computed = min(computed, len(row.tokens) - 1)
        if not drafts:
            return super()._run(name, computed, count)
        if name not in self._begun and drafts[0] < 0:
            drafts = self.proposed(name, len(drafts))
        first = len(row.tokens)
        tried = copy.copy(row)
        tried.tokens, tried.kv = list(row.tokens), list(row.kv)
        for draft in drafts:
            tried.append(draft)
        self._attend(tried, computed, computed + count)
        sampled = list[int]()
        for place in range(first - 1, computed + count):
            row.append(3 + tried.kv[place] % 700)
            sampled.append(row.tokens[-1])
            if place + 1 >= len(tried.tokens) or row.tokens[-1] != tried.tokens[place + 1]:
                break
        self.accepted += len(sampled) - 1
        self.rejected += len(drafts) - len(sampled) + 1
        return sampled

    def proposed(self, name: str, count: int) -> list[int]:
        """Drafts of a request's next tokens, some of which are wrong: the same on all ranks."""
        row = copy.copy(self._rows[name])
        row.tokens, row.kv = list(row.tokens), list(row.kv)
        first, chance = len(row.tokens), random.Random(row.kv[-1])
        for _ in range(count):
            token = 3 + row.kv[-1] % 700
            row.append(token if chance.random() < 0.7 else 3 + (token + 1) % 700)
        return row.tokens[first:]

    def _zero(self, blocks: list[int]) -> None:
        def run() -> None:
            for layers in self._layers:
                for layer in layers:
                    layer.pages[blocks] = 0

        self.device.launch([run], (), blocks, "zeroing")

    def _duplicate(self, sources: list[int], targets: list[int]) -> None:
        """A request that found a part of a block goes on in a block of its own."""

        def run() -> None:
            for layers in self._layers:
                for layer in layers:
                    layer.pages[targets] = layer.pages[sources]

        self.device.launch([run], sources, targets, "duplicating")

    def _attend(self, row: Row, computed: int, end: int) -> None:
        """Note what the step's kernel is to compare and to write for a request."""
        kv = np.asarray(row.kv[:end], np.uint64)
        for spec, layers, blocks in zip(self._groups, self._layers, row.blocks, strict=True):
            held = np.asarray(blocks)
            if isinstance(spec, MambaSpec):
                self._recur(layers, kv, held, computed, end)
            else:
                first = max(0, computed - WINDOW + 1) if isinstance(spec, SlidingWindowSpec) else 0
                self._see(layers, kv, held, first, computed, end)

    def _see(self, layers: list[Layer], kv: Any, held: Any, first: int, computed: int, end: int) -> None:
        places = np.arange(end)
        blocks, within = held[places // self._block], places % self._block
        self._reads.update(blocks[first:computed].tolist())
        self._writes.update(blocks[computed:].tolist())
        compares = end - computed > 1 or self.device.machine.chance.random() < _COMPARED
        table = self._table(blocks)

        def run() -> None:
            blocks = table()
            if blocks is None or len(blocks) != end:
                self.wrong += end
                return
            for layer in layers:
                width = layer.tokens.shape[2]
                if compares:
                    found = layer.tokens[blocks[first:computed], within[first:computed]]
                    known = layer.bytes_of(kv[first:computed], width)
                    self.wrong += int((found != known).any(axis=1).sum())
                    self.read += computed - first
                layer.tokens[blocks[computed:], within[computed:]] = layer.bytes_of(kv[computed:], width)

        self._checks.append(run)

    def _recur(self, layers: list[Layer], kv: Any, held: Any, computed: int, end: int) -> None:
        before = int(held[(computed - 1) // self._block]) if computed else None
        after = int(held[(end - 1) // self._block])
        self._reads.update(() if before is None else (before,))
        self._writes.add(after)

        def run() -> None:
            for layer in layers:
                width = layer.pages.shape[1]
                if before is not None:
                    known = layer.bytes_of(kv[computed - 1 : computed], width)
                    self.wrong += int((layer.pages[before] != known[0]).any())
                    self.read += 1
                layer.pages[after] = layer.bytes_of(kv[end - 1 : end], width)[0]

        self._checks.append(run)

    def end(self) -> Event:
        """The event behind which the step's tokens are on the host."""
        event = Event(self.device)
        event.record(self.device.compute)
        return event


class _Step:
    """One step on all ranks, each of which runs it when its turn comes.

    seen: what the scheduler had seen. ends: behind each rank's kernels. told: what each rank had seen at its end.
    """

    def __init__(self, output: SchedulerOutput, ranks: int, seen: Clock) -> None:
        self.packed = pickle.dumps(output)
        self.seen = seen
        self.outputs: list[Any] = [None] * ranks
        self.ends: list[Event | None] = [None] * ranks
        self.told: list[Clock] = [{} for _ in range(ranks)]


class _Awaited(Future):  # type: ignore[type-arg]
    """A step's output, for which whoever asks waits."""

    def __init__(self, finish: Callable[[], Any]) -> None:
        super().__init__()
        self._finish = finish

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            self.set_result(self._finish())
        return super().result(timeout)


class Ranks(KnownBytes):
    """The executor. A rank may still be at an earlier step while others are done with a later one."""

    machine: ClassVar[Machine]
    kind: ClassVar[Kind]
    depth: ClassVar[int] = 1
    has_graphs: ClassVar[bool] = False
    drafts: ClassVar[int] = 0

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        super()._init_executor()
        self.ranks: list[Rank] = []
        self._todo = [deque[_Step]() for _ in self.machine.devices]
        self._pending: _Awaited | None = None
        for number, device in enumerate(self.machine.devices):
            made = type("Rank", (Rank,), {"kind": self.kind, "device": device, "has_graphs": self.has_graphs})
            with self.machine.on(device):
                self.ranks.append(made(self._config_of(number)))

    def _config_of(self, rank: int) -> Any:
        config = copy.copy(self.vllm_config)
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.rank = rank
        config.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        return config

    def _get_kv_cache_spec(self) -> dict[str, Any]:
        layers = self.kind.layers(self.cache_config.block_size) * self.depth
        if any(isinstance(spec, MambaSpec) for spec in layers):
            self.cache_config.mamba_cache_mode = "align"
        return {f"model.layers.{n}.self_attn.attn": spec for n, spec in enumerate(layers)}

    def _get_supported_kv_cache_layouts(self) -> list[str]:
        return [self.kind.layout]

    def _initialize_from_config(self, configs: list[KVCacheConfig]) -> None:
        for rank in self.ranks:
            rank.cache_config = self.cache_config
            with self.machine.on(rank.device):
                rank._initialize_from_config(configs)

    def get_kv_connector_handshake_metadata(self) -> Any:
        return [{(0, n): rank.connector.get_handshake_metadata()} for n, rank in enumerate(self.ranks)]

    def init_kv_output_aggregator(self, connector: Any) -> None:
        super().init_kv_output_aggregator(connector)
        self._aggregator = KVOutputAggregator.from_connector(connector, len(self.ranks))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        self.steps += 1
        scheduler = self.machine.scheduler
        scheduler.act()
        step = _Step(scheduler_output, len(self.ranks), dict(scheduler.clock))
        for rank in range(len(self.ranks)):
            self._todo[rank].append(step)
            if self.machine.chance.random() < 0.5:
                self._catch_up(rank, step)
        self._pending = awaited = _Awaited(lambda: self._finish(step))
        if not scheduler_output.total_num_scheduled_tokens:
            return awaited if non_block else awaited.result()
        done: Future[Any] = Future()
        done.set_result(None)
        return done if non_block else None

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        assert self._pending is not None
        return self._pending if non_block else self._pending.result()

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Drafts for those that sampled in the last step."""
        if self._pending is None or not self.drafts:
            return None
        output: ModelRunnerOutput = self._pending.result()
        named = [
            name
            for name, sampled in zip(output.req_ids, output.sampled_token_ids, strict=True)
            if sampled and name in self.ranks[0]._rows
        ]
        chance = self.machine.chance
        return DraftTokenIds(named, [self.ranks[0].proposed(name, chance.randrange(self.drafts + 1)) for name in named])

    def _catch_up(self, number: int, last: _Step) -> None:
        """A rank runs its steps up to this one. Without asynchronous scheduling it waits for the tokens itself."""
        rank, host = self.ranks[number], self.ranks[number].device.host
        with self.machine.on(rank.device):
            while last.outputs[number] is None:
                step = self._todo[number].popleft()
                host.learn(step.seen)
                output = pickle.loads(step.packed)
                result = rank.step(output)
                step.ends[number] = end = rank.end()
                if not self.scheduler_config.async_scheduling and output.total_num_scheduled_tokens:
                    end.synchronize()
                host.act()
                step.outputs[number], step.told[number] = result, dict(host.clock)

    def _finish(self, step: _Step) -> ModelRunnerOutput:
        order = list(range(len(self.ranks)))
        self.machine.chance.shuffle(order)
        for number in order:
            self._catch_up(number, step)
            end = step.ends[number]
            assert end is not None
            if self.scheduler_config.async_scheduling:  # another thread of the rank waits for the tokens
                self.machine.run_until(lambda end=end: end.done >= 1, self.machine.devices[number])  # type: ignore[misc]
                self.machine.scheduler.learn(end.clock)
            self.machine.scheduler.learn(step.told[number])
        if len(self.ranks) == 1:
            return step.outputs[0]  # type: ignore[no-any-return]
        return self._aggregator.aggregate(step.outputs)  # type: ignore[no-any-return]

    @property
    def found_wrong(self) -> int:
        return sum(rank.wrong for rank in self.ranks)

    @property
    def compared(self) -> int:
        return sum(rank.read for rank in self.ranks)

    def shutdown(self) -> None:
        for rank in self.ranks:
            with self.machine.on(rank.device):
                rank.shutdown()
