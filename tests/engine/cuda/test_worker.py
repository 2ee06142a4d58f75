"""hotspan's CUDA worker alone: its bytes are those of the CPU worker, and it leaves nothing behind, whatever fails."""

import ast
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor, GPULoadStoreSpec
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.gpu_worker import CPUOffloadingWorker

from hotspan.core.errors import EngineError
from hotspan.engine import cuda
from hotspan.engine.cuda import CudaWorker, SlabRegion, asked_of_region
from hotspan.engine.gaps import Gaps
from hotspan.engine.worker import HostWorker
from hotspan.tiers.slab import SharedSlab
from kit.cuda.install import attach, installed, on_device
from kit.cuda.machine import CudaError, Machine

from .faults import DESCRIPTORS_ARE_REUSED, LOADS_DO_NOT_WAIT

BLOCKS, PER_CHUNK, SLOTS, RANKS = 16, 4, 6, 2

LAYOUTS: dict[str, tuple[list[int], list[list[tuple[int, int]]]]] = {
    # Pages of the tensors; of each group, tensors and the bytes that it has of their pages.
    "one layer": ([1024], [[(0, 1024)]]),
    "layers": ([1024, 1024, 1024], [[(0, 1024), (1, 1024), (2, 1024)]]),
    "across layers": ([3072], [[(0, 3072)]]),
    "latents": ([1152, 1152], [[(0, 1152), (1, 1152)]]),
    "fp8 and scales": ([1031, 1031], [[(0, 1031), (1, 1031)]]),
    "a window beside": ([1024, 1024], [[(0, 1024), (1, 1024)], [(0, 1024)]]),
    "a state beside": ([1024, 1024], [[(0, 1024), (1, 1024)], [(0, 700), (1, 512)]]),
}


class Side:
    """Memory of an engine, on a device or not, and a slab that held something else."""

    def __init__(self, layout: str, junk: int, machine: Machine | None = None, *, stores: bool = True) -> None:
        pages, groups = LAYOUTS[layout]
        sizes = [page * BLOCKS for page in pages]
        if machine is None:
            self.memory = np.zeros(sum(sizes), np.int8)
            raw = torch.from_numpy(self.memory)
        else:
            raw = torch.frombuffer(machine.current.allocate(sum(sizes)), dtype=torch.int8)
            self.memory = machine.current.memory.view(np.int8)
        starts = np.cumsum([0, *sizes])
        self.caches = CanonicalKVCaches(
            [
                CanonicalKVCacheTensor(raw[start : start + size].view(BLOCKS, page), page)
                for start, size, page in zip(starts, sizes, pages, strict=False)
            ],
            [[CanonicalKVCacheRef(n, size) for n, size in group] for group in groups],
        )
        self.rank_bytes = sum(pages) * PER_CHUNK
        self.slab = SharedSlab(f"side-{uuid.uuid4().hex[:8]}", SLOTS, -(-self.rank_bytes * RANKS // 4096) * 4096)
        self.slab.unlink()
        self.slots = np.frombuffer(self.slab.view, np.int8).reshape(SLOTS, -1)
        self.slots[:] = junk
        if machine is None:
            self.worker: Any = HostWorker(self.caches, self.slab, PER_CHUNK, self.rank_bytes, stores=stores)
        else:
            machine.current.blocks = [(int(start), page, BLOCKS) for start, page in zip(starts, pages, strict=False)]
            attach(machine, self.slab, self.rank_bytes)
            self.worker = CudaWorker(on_device(self.caches), self.slab, PER_CHUNK, self.rank_bytes, stores=stores)

    def store(self, job: int, stored: GPULoadStoreSpec, slots: list[int]) -> None:
        self.worker.submit_store(job, stored, CPULoadStoreSpec(slots))
        self.worker.wait({job})

    def load(self, job: int, slots: list[int], loaded: GPULoadStoreSpec) -> None:
        self.worker.submit_load(job, CPULoadStoreSpec(slots), loaded)
        self.worker.wait({job})


@pytest.fixture
def machine() -> Iterator[Machine]:
    with installed(Machine(3, pace=1.0)) as made:
        yield made


def of_group(group: int, groups: int, blocks: list[int], first: int) -> GPULoadStoreSpec:
    """Blocks of one group, the first of which is the `first` of its text."""
    sizes = [len(blocks) if n == group else 0 for n in range(groups)]
    return GPULoadStoreSpec(
        blocks, group_sizes=sizes, block_indices=[first if n == group else 0 for n in range(groups)]
    )


@pytest.mark.parametrize("has_triton", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_workers_store_the_same_bytes(machine: Machine, layout: str, has_triton: bool) -> None:
    """A slot that the CUDA worker stores equals the CPU worker's, gaps included, and each loads what the other stored.

    Whole chunks, a text's end in the middle of one, and a window's last block alone; the slots held something else.
    """
    with contextlib.ExitStack() as patches:
        if has_triton:
            machine.has_triton = True
            patches.enter_context(installed(machine))
        groups = len(LAYOUTS[layout][1])
        sides = host, device = Side(layout, 7), Side(layout, 9, machine)
        host.memory[:] = np.random.default_rng(5).integers(-128, 128, host.memory.size)
        device.memory[:] = host.memory
        last = groups - 1
        jobs = [
            (of_group(0, groups, [0, 1, 2, 3, 4, 5, 6, 7], 0), [0, 1]),
            (of_group(0, groups, [8, 9], 2), [2]),
            (of_group(last, groups, [10], 7), [3]),
        ]
        own = slice(host.rank_bytes, 2 * host.rank_bytes)
        for side in sides:
            for job, (stored, slots) in enumerate(jobs):
                side.store(job, stored, slots)
        assert np.array_equal(host.slots[:4, own], device.slots[:4, own])
        assert (device.slots[:, : host.rank_bytes] == 9).all() and (device.slots[4:] == 9).all()
        host.slots[:4, own], device.slots[:4, own] = device.slots[:4, own].copy(), host.slots[:4, own].copy()
        for side in sides:
            side.memory[:] = 3
            side.load(10, [0, 1], of_group(0, groups, [7, 6, 5, 4, 3, 2, 1, 0], 0))
            side.load(11, [3], of_group(last, groups, [15], 7))
        assert np.array_equal(host.memory, device.memory)
        assert (host.memory != 3).any() and machine.races.found == []
    for side in sides:
        side.slots = None  # type: ignore[assignment]
        side.worker.shutdown()


@pytest.mark.parametrize("is_on_device", [False, True])
def test_a_rank_that_shares_anothers_copy_only_loads(machine: Machine, is_on_device: bool) -> None:
    """Where another rank stores the same bytes, stores end at once, in any number and each once, gaps stay as they are,
    and loads bring what lies there."""
    side = Side("a window beside", 7, machine if is_on_device else None, stores=False)
    side.memory[:] = 3
    for job, (group, blocks, first) in enumerate([(0, [0, 1, 2, 3], 0), (1, [10], 7)]):
        side.store(job, of_group(group, 2, blocks, first), [job])
    assert sorted(result.job_id for result in side.worker.get_finished()) == [0, 1]
    assert side.worker.get_finished() == [] and (side.slots == 7).all()
    side.load(2, [0], of_group(0, 2, [0, 1, 2, 3], 0))
    assert (side.memory[: 4 * 1024] == 7).all() and (side.memory == 7).sum() == 2 * 4 * 1024
    assert machine.races.found == []
    side.slots = None  # type: ignore[assignment]
    side.worker.shutdown()


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_registration_that_fails_is_told_and_loses_nothing(
    machine: Machine, part: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Where memory can't be locked, or only in part, all of it stays as it is: hotspan's log has what to do, copies are
    right, and nothing is left registered."""
    machine.pins = int(part * SLOTS * 8192)
    with installed(machine), caplog.at_level(logging.WARNING), pytest.MonkeyPatch.context() as patches:
        patches.setattr(gpu_worker, "MAX_HOST_REGISTER_CHUNK_BYTES", 8192)
        side = Side("one layer", 1, machine)
        assert not machine.current.driver.registered
        side.memory[:] = 5
        side.store(1, of_group(0, 1, [0, 1, 2, 3], 0), [2])
        assert (side.slots[2, side.rank_bytes : 2 * side.rank_bytes] == 5).all()
    assert "slab_not_registered" in caplog.text and "memlock" in caplog.text
    side.worker.shutdown()


def test_all_is_unregistered_at_the_end_and_after_a_failed_start(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays registered when the worker ends, or when it fails after the slab was registered."""
    side = Side("layers", 1, machine)
    assert machine.current.driver.registered
    side.store(1, of_group(0, 1, [0, 1, 2, 3], 0), [2])
    side.worker.shutdown()
    assert not machine.current.driver.registered and machine.wrong_uses == []

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Gaps, "__init__", fails)
    slab = SharedSlab(f"side-{uuid.uuid4().hex[:8]}", SLOTS, side.slab.slot_bytes)
    slab.unlink()
    attach(machine, slab, side.rank_bytes)
    with pytest.raises(MemoryError):
        CudaWorker(on_device(side.caches), slab, PER_CHUNK, side.rank_bytes)
    assert not machine.current.driver.registered


def test_copies_in_flight_end_before_memory_is_unregistered(machine: Machine) -> None:
    """A worker that ends lets its copies end first, and only then lets the driver forget the slab."""
    machine.pace = 0.0
    side = Side("layers", 1, machine)
    for job in range(3):
        side.worker.submit_store(job, of_group(0, 1, [0, 1, 2, 3], 0), CPULoadStoreSpec([job]))
        side.worker.submit_load(10 + job, CPULoadStoreSpec([5]), of_group(0, 1, [8, 9, 10, 11], 0))
    assert any(stream.queue for stream in machine.streams)
    side.worker.shutdown()
    assert not any(stream.queue for stream in machine.streams)
    assert machine.wrong_uses == [] and not machine.current.driver.registered


def _ends_until_0_27(worker: CPUOffloadingWorker) -> None:
    """vLLM's own end of a worker, which stops at the first copy that did not end."""
    for handler in (worker._store_handler, worker._load_handler):
        while handler._transfers:
            handler._transfers.popleft().end_event.synchronize()
    if worker._mmap_region is not None:
        worker._mmap_region.cleanup()
        worker._mmap_region = None


@pytest.mark.parametrize("own_end", [CPUOffloadingWorker.shutdown, _ends_until_0_27], ids=["installed", "until 0.27"])
def test_all_is_let_go_after_a_device_failed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, own_end: Callable[[Any], None]
) -> None:
    """The end of a worker whose device failed raises nothing, so that the engine goes on and closes its tiers."""
    monkeypatch.setattr(CPUOffloadingWorker, "shutdown", own_end)
    machine.pace = 0.0
    side = Side("layers", 1, machine)
    for job in range(3):
        side.worker.submit_store(job, of_group(0, 1, [0, 1, 2, 3], 0), CPULoadStoreSpec([job]))
    machine.current.fail("an uncorrectable ECC error was encountered")
    side.worker.shutdown()
    assert not machine.current.driver.registered


def test_a_load_comes_after_what_the_engine_computes(machine: Machine) -> None:
    """A load into a block that a kernel in flight still writes waits for it; without vLLM's wait that is a race."""
    machine.pace = 0.0
    side = Side("layers", 1, machine)
    load = CPULoadStoreSpec([0]), of_group(0, 1, [0, 1, 2, 3], 0)
    machine.current.launch([lambda: None], (), [2], "a forward pass")
    side.worker.submit_load(1, *load)
    assert machine.races.found == []
    with LOADS_DO_NOT_WAIT.planted():
        machine.current.launch([lambda: None], (), [6], "a forward pass")
        side.worker.submit_load(2, CPULoadStoreSpec([1]), of_group(0, 1, [4, 5, 6, 7], 0))
    assert machine.races.found == ["a load writes beside a forward pass at ('block', 0, 6)"]
    side.worker.shutdown()


def test_loads_wait_where_the_engines_own_do_not(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until vLLM 0.27 its loads wait for nothing that is computed: hotspan lets them, on new and on used streams."""
    machine.pace = 0.0
    monkeypatch.setattr(cuda, "ENGINE", (0, 27))
    side = Side("layers", 1, machine)
    with LOADS_DO_NOT_WAIT.planted():
        for job in range(3):
            machine.current.launch([lambda: None], (), [4 * job], "a forward pass")
            blocks = [4 * job + n for n in range(4)]
            side.worker.submit_load(job, CPULoadStoreSpec([job]), of_group(0, 1, blocks, 0))
            if job:
                side.worker.wait({0, 1})
                side.worker.get_finished()
    assert machine.races.found == []
    side.worker.shutdown()


@pytest.mark.parametrize("are_reused", [False, True])
def test_descriptors_stay_until_a_kernel_has_read_them(machine: Machine, are_reused: bool) -> None:
    """Small loads go by a kernel, which finds its own descriptors however late it runs; reused ones are noticed."""
    machine.has_triton, machine.pace = True, 0.0
    with installed(machine), DESCRIPTORS_ARE_REUSED.planted() if are_reused else contextlib.nullcontext():
        side = Side("layers", 1, machine)
        side.slots[:2, side.rank_bytes : 2 * side.rank_bytes] = [[5], [6]]
        for job in range(2):
            blocks = [8 * job + n for n in range(8)]
            side.worker.submit_load(job, CPULoadStoreSpec([job, job]), of_group(0, 1, blocks, 0))
        side.worker.shutdown()
    assert bool(machine.wrong_uses) is are_reused
    assert are_reused or ((side.memory[: 8 * 1024] == 5).all() and (side.memory[8 * 1024 : 16 * 1024] == 6).all())


def test_loads_are_awaited_where_nothing_is_computed(machine: Machine) -> None:
    """`await_loads` returns once no load is in flight, and each job is reported once all the same."""
    machine.pace = 0.2
    side = Side("layers", 1, machine)
    for job in range(3):
        side.worker.submit_load(job, CPULoadStoreSpec([5]), of_group(0, 1, [8, 9, 10, 11], 0))
    side.worker.await_loads(1000.0)
    assert not any(stream.queue for stream in machine.streams)
    assert sorted(result.job_id for result in side.worker.get_finished()) == [0, 1, 2]
    assert side.worker.get_finished() == []
    side.worker.shutdown()


@pytest.mark.parametrize("at", range(1, 40, 3))
def test_an_error_at_any_operation_is_raised_and_nothing_is_told(machine: Machine, at: int) -> None:
    """After a sticky error no job is reported that had not ended before it, and every call raises."""
    side = Side("one layer", 1, machine)
    machine.fails_at = machine.operations + at
    side.memory[:] = 5
    told: list[int] = []
    with pytest.raises(CudaError):
        for job in range(20):
            side.worker.submit_store(job, of_group(0, 1, [0, 1, 2, 3], 0), CPULoadStoreSpec([job % SLOTS]))
            told += [result.job_id for result in side.worker.get_finished()]
    for job in told:
        assert (side.slots[job % SLOTS, side.rank_bytes : 2 * side.rank_bytes] == 5).all()
    with pytest.raises(CudaError):
        side.worker.submit_load(99, CPULoadStoreSpec([0]), of_group(0, 1, [0, 1, 2, 3], 0))


def test_a_worker_that_asks_for_more_is_refused(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The installed release asks the slab only for what it has; one that asks for more is refused at the start."""
    source = Path(gpu_worker.__file__).read_text()
    slab = SharedSlab(f"side-{uuid.uuid4().hex[:8]}", 1, 4096)
    slab.unlink()
    asked = asked_of_region(ast.parse(source))
    assert {"_base", "rank", "pinned_addresses"} <= asked
    assert all(hasattr(SlabRegion(slab, 0, 0), name) for name in asked)
    assert all(hasattr(SlabRegion(slab, 0, 0), name) for name in cuda._FIELDS)
    monkeypatch.setattr("inspect.getsource", lambda module: source + "\n\ndef more(region): region.zones.pin()\n")
    side = Side("one layer", 1)
    with pytest.raises(EngineError, match="zones"):
        cuda.cuda_worker(side.caches, slab, PER_CHUNK, 0)
    side.slots = None  # type: ignore[assignment]
    side.worker.shutdown()
