"""The worker's copies: loads before stores, fair between requests, and a failed one never passes for done."""

import threading
import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.kv_offload.base import GPULoadStoreSpec
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec

from hotspan.core.errors import EngineError
from hotspan.engine.copies import LOADS_PER_STORE, Copy, CopyQueue, Place
from hotspan.engine.worker import HostWorker
from hotspan.tiers.slab import SharedSlab


def copy(job_id: int, blocks: int, *, store: bool = False) -> Copy:
    return Copy(job_id, store, [Place(0, n, 0, 0) for n in range(blocks)])


def run(queue: CopyQueue, limit: int = 10**6) -> list[int]:
    """The order in which jobs end."""
    ended = []
    while len(ended) < limit and (taken := queue.take()) is not None:
        if queue.put_back(taken[0]):
            ended.append(taken[0].job_id)
    return ended


def test_equal_loads_end_as_they_came() -> None:
    """First in, first out, also among those that come while others are copied."""
    queue = CopyQueue(2)
    for n in range(32):
        queue.add(copy(n, 8))
    first = run(queue, 10)
    for n in range(32, 40):
        queue.add(copy(n, 8))
    assert first + run(queue) == list(range(40))


def test_the_one_that_waits_longest_is_served() -> None:
    """A load ends while new ones keep coming, as many as are copied: the last one in is not the first one out."""
    queue = CopyQueue(1)
    queue.add(copy(0, 4))
    ended: list[int] = []
    for n in range(1, 40):
        queue.add(copy(n, 4))
        ended += run(queue, 1)
    assert ended == list(range(39))


def test_a_long_load_does_not_hold_a_short_one() -> None:
    """One chunk that comes behind a hundred waits for a few pieces; the hundred ends all the same."""
    queue = CopyQueue(2)
    queue.add(copy(0, 200))
    taken = queue.take()
    assert taken is not None and not queue.put_back(taken[0])
    queue.add(copy(1, 2))
    assert run(queue) == [1, 0]


def test_short_loads_do_not_starve_a_long_one() -> None:
    """While short loads come without end, a long one lets as many of their blocks go first as it has itself."""
    queue = CopyQueue(2)
    queue.add(copy(0, 40))
    ended: list[int] = []
    for n in range(1, 100):
        queue.add(copy(n, 2))
        ended += run(queue, 1)
    assert ended.index(0) == 20


def test_stores_come_after_loads_but_come() -> None:
    """A store waits while there are loads, and gets one piece for each eight of theirs."""
    queue = CopyQueue(1)
    queue.add(copy(0, 2, store=True))
    queue.add(copy(1, 40))
    kinds = []
    while (taken := queue.take()) is not None:
        queue.put_back(taken[0])
        kinds.append(taken[0].is_store)
    turns = [n for n, is_store in enumerate(kinds) if is_store]
    assert turns == [LOADS_PER_STORE, 2 * LOADS_PER_STORE + 1] and len(kinds) == 42


def test_what_the_engine_waits_for_goes_first() -> None:
    """A job that a step is held for, a store too, overtakes all, and ends whole."""
    queue = CopyQueue(1)
    for n in range(4):
        queue.add(copy(n, 5))
    queue.add(copy(4, 5, store=True))
    taken = queue.take()
    assert taken is not None
    queue.put_back(taken[0])
    queue.hurry({3, 4, 99})
    assert run(queue) == [3, 4, 0, 1, 2]


JOBS = st.lists(st.tuples(st.integers(1, 30), st.booleans(), st.integers(0, 6)), min_size=1, max_size=20)


@given(JOBS, st.integers(1, 4))
def test_every_block_is_copied_once(jobs: list[tuple[int, bool, int]], piece: int) -> None:
    """Whatever comes when, each job's blocks are handed out once and in order, and each job ends once.

    And no load ends more than its own length later than in order of arrival.
    """
    queue, handed, ended, latest, done = CopyQueue(piece), {}, [], {}, 0
    for n, (blocks, store, steps) in enumerate(jobs):
        queue.add(copy(n, blocks, store=store))
        if not store:
            latest[n] = done + sum(load.left for load in queue._loads.values()) + blocks
        for _ in range(steps if n < len(jobs) - 1 else 10**4):
            taken = queue.take()
            if taken is None:
                break
            handed.setdefault(taken[0].job_id, []).extend(place.block for place in taken[1])
            done += 0 if taken[0].is_store else len(taken[1])
            if queue.put_back(taken[0]):
                ended.append(taken[0].job_id)
                assert done <= latest.get(taken[0].job_id, done)
    assert sorted(ended) == list(range(len(jobs))) and not len(queue)
    assert all(handed[n] == list(range(blocks)) for n, (blocks, _, _) in enumerate(jobs))


# -- the thread --------------------------------------------------------------------------------------------------------

PAGE, PER_CHUNK, SLOTS, BLOCKS = 4096, 2, 8, 16


class Rig:
    """A worker over memory that can be looked at."""

    def __init__(self) -> None:
        self.memory = torch.zeros((BLOCKS, PAGE), dtype=torch.int8)
        caches: Any = SimpleNamespace(
            tensors=[SimpleNamespace(tensor=self.memory, page_size_bytes=PAGE)],
            group_data_refs=[[SimpleNamespace(tensor_idx=0, page_size_bytes=PAGE)]],
        )
        self.slab = SharedSlab(f"copies-{uuid.uuid4().hex[:8]}", SLOTS, PAGE * PER_CHUNK)
        self.slab.unlink()
        self.worker = HostWorker(caches, self.slab, PER_CHUNK, 0)
        self.bytes = np.frombuffer(self.slab.view, np.int8).reshape(SLOTS, PER_CHUNK, PAGE)

    def submit(self, job_id: int, blocks: list[int], slots: list[int], *, store: bool = False) -> None:
        engine = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        ends = CPULoadStoreSpec(slots)
        if store:
            self.worker.submit_store(job_id, engine, ends)
        else:
            self.worker.submit_load(job_id, ends, engine)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.bytes = None  # type: ignore[assignment]
    made.worker.shutdown()


def test_copies_arrive(rig: Rig) -> None:
    """A store and a load back into other blocks give the same bytes, and both are told of once."""
    rig.memory[:4] = torch.randint(-128, 128, (4, PAGE), dtype=torch.int8)
    rig.submit(1, [0, 1, 2, 3], [5, 2], store=True)
    rig.worker.wait({1})
    rig.submit(2, [8, 9, 10, 11], [5, 2])
    rig.worker.wait({2})
    assert torch.equal(rig.memory[8:12], rig.memory[:4])
    assert [(result.job_id, result.success, result.transfer_size) for result in rig.worker.get_finished()] == [
        (1, True, 4 * PAGE),
        (2, True, 4 * PAGE),
    ]
    assert rig.worker.get_finished() == []


def test_a_slot_keeps_nothing_of_an_earlier_chunk() -> None:
    """What a store has no bytes for is zero: the pages of other groups, padding, and blocks that are left out.

    The slot may have held another tenant's chunk, and all of it goes to the tiers below.
    """
    tensors = [torch.ones((BLOCKS, PAGE), dtype=torch.int8) for _ in range(2)]
    part = PAGE // 2 + 1
    caches: Any = SimpleNamespace(
        tensors=[SimpleNamespace(tensor=tensor, page_size_bytes=PAGE) for tensor in tensors],
        group_data_refs=[
            [SimpleNamespace(tensor_idx=n, page_size_bytes=PAGE) for n in range(2)],
            [SimpleNamespace(tensor_idx=0, page_size_bytes=part)],
        ],
    )
    slab = SharedSlab(f"gaps-{uuid.uuid4().hex[:8]}", SLOTS, 2 * PAGE * PER_CHUNK)
    slab.unlink()
    worker = HostWorker(caches, slab, PER_CHUNK, 0)
    rows = np.frombuffer(slab.view, np.int8).reshape(SLOTS, 2, PER_CHUNK, PAGE)
    rows[:] = 7
    whole = GPULoadStoreSpec([1, 2], group_sizes=[2, 0], block_indices=[0, 0])
    last = GPULoadStoreSpec([4], group_sizes=[0, 1], block_indices=[0, 3])
    for job, (stored, slot) in enumerate([(whole, 0), (last, 1)]):
        worker.submit_store(job, stored, CPULoadStoreSpec([slot]))
        worker.wait({job})
    assert (rows[0] == 1).all() and (rows[2:] == 7).all()
    expected = np.zeros_like(rows[1])
    expected[0, 1, :part] = 1
    assert np.array_equal(rows[1], expected)
    del rows
    worker.shutdown()


@pytest.mark.parametrize("store", [True, False])
def test_a_failed_copy_is_never_taken_for_done(rig: Rig, store: bool) -> None:
    """Its job is not finished but an error that stops the engine: what it left half copied is no hit, and no answer.

    Jobs beside it are copied to their end, and nobody waits for the lost one for ever.
    """
    rig.bytes[3] = 7
    rig.submit(1, [0, 1, 2, 3], [1, SLOTS + 40], store=store)
    rig.submit(2, [4, 5], [3])
    rig.worker.wait({1, 2})
    with pytest.raises(EngineError, match="job 1"):
        rig.worker.get_finished()
    with pytest.raises(EngineError):
        rig.worker.get_finished()
    assert bool((rig.memory[4:6] == 7).all())


def test_loads_are_awaited_and_then_stores_end(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """`await_loads` returns when no load is left, whatever stores are; jobs are taken as the queue says."""
    begun, go, order = threading.Event(), threading.Event(), []
    inner = rig.worker._copy

    def slow(copy: Copy, places: list[Place]) -> int:
        begun.set()
        assert go.wait(60)
        order.append(copy.job_id)
        return inner(copy, places)

    monkeypatch.setattr(rig.worker, "_copy", slow)
    rig.submit(0, [0, 1], [0], store=True)
    assert begun.wait(60)
    for n in range(1, 5):
        rig.submit(n, [2 * n, 2 * n + 1], [n])
    go.set()
    rig.worker.await_loads(60)
    rig.worker.wait({0, 1, 2, 3, 4})
    assert order == [0, 1, 2, 3, 4]
