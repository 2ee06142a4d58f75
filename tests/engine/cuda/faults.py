"""Faults that the search has to find: each is a way in which the order of copies, or whose bytes they are, is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest.mock import patch

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker
from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Handler

from hotspan.cache.entry import Entry, State
from hotspan.cache.ram import RamTier
from hotspan.cache.tiered import TieredCache
from hotspan.engine import connector
from hotspan.engine.connector import HotspanConnector
from hotspan.engine.cuda import CudaWorker, SlabRegion, host_unregister
from hotspan.engine.gaps import Gaps
from kit.cuda.machine import Device
from kit.cuda.streams import Event, Stream

from .runner import Rank

Change = tuple[Any, str, Callable[[Any], Any]]
"""Whose attribute is replaced, by what is made from what it was."""


@dataclass(frozen=True)
class Fault:
    """changes: that plant it. plan: fields of worlds that can show it. found_by: the first seed of one where it did."""

    name: str
    changes: tuple[Change, ...]
    plan: Mapping[str, Any] = field(default_factory=dict)
    found_by: int = 0

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Inside, hotspan or vLLM has it."""
        with ExitStack() as patches:
            for owner, name, made in self.changes:
                inner = getattr(owner, name)
                instead = made(inner)
                patches.enter_context(patch.object(owner, name, wraps(inner)(instead) if callable(inner) else instead))
            yield


def _on_another_stream(inner: Any) -> Any:
    return lambda self, stream: inner(self, stream.device.compute)


def _finished_early(inner: Any) -> Any:
    def get_finished(self: Any) -> list[TransferResult]:
        told = self.__dict__.setdefault("told", set())
        early = [each for each in self._transfers if each.job_id not in told]
        told.update(each.job_id for each in early)
        inner(self)
        return [TransferResult(each.job_id, True, each.num_bytes, 0.001) for each in early]

    return get_finished


_directions: list[bool] = []


def _noted_direction(inner: Any) -> Any:
    def transfer_async(self: Any, *arguments: Any) -> Any:
        _directions.append(self.gpu_to_cpu)
        try:
            return inner(self, *arguments)
        finally:
            _directions.pop()

    return transfer_async


def _no_wait_of(is_store: bool) -> tuple[Change, ...]:
    def wait_stream(inner: Any) -> Any:
        def wrapper(self: Stream, other: Stream) -> None:
            if not (_directions and _directions[-1] is is_store):
                inner(self, other)

        return wrapper

    return (
        (Handler, "transfer_async", _noted_direction),
        (Stream, "wait_stream", wait_stream),
    )


def _always_ahead(inner: Any) -> Any:
    return lambda self, stream, pieces, **how: inner(self, stream, pieces, **(how | {"reads_ahead": True}))


def _load_ends_as_it_begins(inner: Any) -> Any:
    def begin_load(self: TieredCache, keys: Any, reader: Any) -> Any:
        slots = inner(self, keys, reader)
        self.end_load(keys)
        return slots

    return begin_load


def _hit_before_it_is_stored(inner: Any) -> Any:
    def begin_store(self: TieredCache, *arguments: Any, **named: Any) -> Any:
        placed = inner(self, *arguments, **named)
        for entry in self.ram.entries.values():
            if entry.state is State.STORING:
                entry.state = State.READY
        return placed

    return begin_store


def _frees_at_a_reset(inner: Any) -> Any:
    def hold(self: RamTier) -> None:
        inner(self)
        self.unhold()

    return hold


def _one_rank_for_all(inner: Any) -> Any:
    def mark_completed(self: OffloadingWorkerMetadata, job_id: int) -> None:
        from kit.cuda import install

        machine = install.current_machine()
        if machine.current.index == 0:
            for _ in machine.devices:
                self.completed_jobs[job_id] = len(machine.devices)

    return mark_completed


def _unregisters_first(inner: Any) -> Any:
    def shutdown(self: Any) -> None:
        region = self._mmap_region
        for address in region.pinned_addresses:
            host_unregister(address)
        region.pinned_addresses.clear()
        inner(self)

    return shutdown


def _reuses_descriptors(inner: Any) -> Any:
    def transfer_async(self: Any, *arguments: Any) -> Any:
        done = inner(self, *arguments)
        last = self._transfers[-1]
        self._buffer_pool[:] = [(last.batch_src, last.batch_dst, last.batch_sizes)]
        return done

    return transfer_async


def _flushes_nothing(inner: Any) -> Any:
    def build(self: Any, *arguments: Any) -> Any:
        meta = inner(self, *arguments)
        meta.jobs_to_flush = None
        return meta

    return build


def _nothing(inner: Any) -> Any:
    return lambda self, *arguments: None


def _first_part(inner: Any) -> Any:
    return lambda self, slab, offset, rank: inner(self, slab, 0, rank)


def _every_rank_stores(inner: Any) -> Any:
    return lambda self, *arguments, **named: inner(self, *arguments, **(named | {"stores": True}))


def _nobody_stores(inner: Any) -> Any:
    return lambda self, *arguments, **named: inner(self, *arguments, **(named | {"stores": False}))


def _used_by_the_engine_alone(inner: Any) -> Any:
    return property(lambda self: self.engine_copies or self.held)


_ASYNC: Mapping[str, Any] = {"is_async": True}
_META = "build_connector_meta"
_REPORTS = OffloadingWorkerMetadata

LOADS_DO_NOT_WAIT = Fault("loads do not wait for the forward pass", _no_wait_of(False))
DESCRIPTORS_ARE_REUSED = Fault(
    "descriptors are reused while a kernel needs them", ((Handler, "transfer_async", _reuses_descriptors),)
)
"""Two that no world shows soon, and a test of the worker alone does."""

FAULTS = (
    Fault("the end of a copy is recorded on another stream", ((Event, "record", _on_another_stream),)),
    Fault("a copy is told as finished before it is", ((Handler, "get_finished", _finished_early),)),
    Fault(
        "blocks are given away while they are stored",
        ((Handler, "wait", _nothing),),
        {"kind": "full", "block": 64, "blocks": 66},
    ),
    Fault("jobs to flush are not sent to the workers", ((HotspanConnector, _META, _flushes_nothing),)),
    Fault("stores do not wait for the forward pass", _no_wait_of(True), _ASYNC),
    Fault("stores read blocks ahead", ((Device, "copy", _always_ahead),), _ASYNC),
    Fault("a slot is free when its load begins", ((TieredCache, "begin_load", _load_ends_as_it_begins),), found_by=17),
    Fault(
        "a chunk is a hit before it is stored",
        ((TieredCache, "begin_store", _hit_before_it_is_stored),),
        {"pace": 0.0, "is_async": True, "has_disk": True, "kind": "full", "slots": 8},
        found_by=2,
    ),
    Fault(
        "gaps keep what was there",
        ((Gaps, "blank", _nothing),),
        {"kind": "windows", "slots": 8, "block": 16, "has_disk": True, "is_async": False, "settles": True}
        | {"drafts": 0, "disk_slots": 0},
    ),
    Fault(
        "a reset frees slots that are copied",
        ((RamTier, "hold", _frees_at_a_reset),),
        {"resets": 0.2, "pace": 0.0, "is_async": False, "has_disk": True, "kind": "full", "slots": 8},
    ),
    Fault("a rank's report is taken for all ranks'", ((_REPORTS, "mark_completed", _one_rank_for_all),), {"ranks": 2}),
    Fault(
        "memory is unregistered before the last copy",
        ((CPUOffloadingWorker, "shutdown", _unregisters_first), (connector, "_FINISH_S", lambda inner: 0.0)),
        {"pins": 1.0, "pace": 2.0, "settles": False, "is_async": True},
    ),
    Fault("each rank copies to the first one's part", ((SlabRegion, "__init__", _first_part),), {"ranks": 2}),
    Fault(
        "each rank stores what all ranks share",
        ((CudaWorker, "__init__", _every_rank_stores),),
        {"ranks": 2, "kind": "latents"},
    ),
    Fault(
        "the host writes a graph's inputs before they are copied",
        ((Rank, "_await_buffers", _nothing),),
        {"has_graphs": True, "is_async": True, "pace": 0.0},
    ),
    Fault("no rank stores", ((CudaWorker, "__init__", _nobody_stores),), {"ranks": 2, "kind": "latents"}),
    Fault(
        "a slot is free while a tier uses it",
        ((Entry, "is_used", _used_by_the_engine_alone),),
        {"has_disk": True, "slots": 8},
    ),
)
