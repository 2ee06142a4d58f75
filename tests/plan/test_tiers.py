"""The choice: LMI's vectors where its formula is right, ours where it is not, and what must hold for every machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotspan.core.types import GIB, MIB
from hotspan.plan.disk import DiskProbe
from hotspan.plan.host import Answerer, Daemon, Host
from hotspan.plan.memory import Available, SharedMemory
from hotspan.plan.mounts import Medium
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import (
    MAX_CHUNKS,
    MIN_BYTES,
    MIN_CHUNKS,
    MIN_DISK_BYTES,
    MODEST,
    RANK_BYTES,
    RESERVE,
    SERVER_BYTES,
    Extent,
    TierPlan,
    choose_tiers,
)

from . import models
from .models import drive, machine

LLAMA = ModelShape.from_config(models.LLAMA_70B)
QWEN = ModelShape.from_config(models.QWEN_7B)


def ranks(count: int) -> ModelShape:
    return ModelShape.from_config(models.LLAMA_70B, tensor_parallel=count)


def whys(plan: TierPlan) -> str:
    return "\n".join(f"{reason.what}: {reason.value}: {reason.why}" for reason in plan.reasons)


# -- LMI's vectors: a rank of theirs has as much as hotspan's tier by its ranks -----------------------------------


def test_lmi_memory_where_its_fifth_decides() -> None:
    """100 left, two ranks, a model of 10: 40 for each, as LMI says."""
    plan = choose_tiers(machine(100), ranks(2), weights_bytes=10 * GIB)
    assert plan.ram_bytes / 2 == pytest.approx(40 * GIB, abs=MIB)


def test_lmi_disk_where_all_of_it_is_free() -> None:
    """500 of disk, two ranks, a model of 20: 200 for each, as LMI says."""
    plan = choose_tiers(machine(100, disks=(drive(500),)), ranks(2), weights_bytes=20 * GIB)
    assert plan.disk is not None and plan.disk.bytes / 2 == pytest.approx(200 * GIB, abs=MIB)


def test_lmi_keeps_twice_a_gpus_weights_free_and_we_do_not() -> None:
    """200 left, four ranks, a model of 50 on GPUs: LMI's 2x reserve gives 25 each, for weights that lie elsewhere."""
    plan = choose_tiers(machine(200), ranks(4), weights_bytes=50 * GIB)
    assert plan.ram_bytes / 4 == pytest.approx(40 * GIB, abs=MIB)
    disk = choose_tiers(machine(200, disks=(drive(1000),)), ranks(4), weights_bytes=150 * GIB).disk
    assert disk is not None and disk.bytes / 4 == pytest.approx(200 * GIB, abs=MIB), "LMI: 175, for weights elsewhere"


def test_a_common_box_has_a_ram_tier() -> None:
    """28 GiB left and a model of 16 GiB on one GPU: LMI chooses 0."""
    assert choose_tiers(machine(28), QWEN, weights_bytes=16 * GIB).ram_bytes > 20 * GIB


def test_what_is_taken_of_a_disk_is_free() -> None:
    """60 GiB free of a larger disk: LMI chose 201 of its total."""
    disk = choose_tiers(machine(100, disks=(drive(60),)), QWEN).disk
    assert disk is not None and disk.bytes == 48 * GIB


def test_a_container_gets_a_share_of_its_own_limit() -> None:
    """What counts is what is left of the cgroup's limit, and the table says whose limit that was."""
    plan = choose_tiers(machine(12, why="the limit of cgroup /pod"), QWEN)
    assert plan.ram_bytes == (12 - 5) * GIB
    assert "the limit of cgroup /pod" in whys(plan)


# -- a CPU engine shares the memory --------------------------------------------------------------------------------


def test_a_cpu_engine_has_its_weights_and_pool_in_the_same_memory() -> None:
    """64 left, weights of 15: what the reserve and the weights leave is halved between the pool and the tier."""
    plan = choose_tiers(machine(64), QWEN, is_cpu_engine=True, weights_bytes=15 * GIB)
    left = 64 * (1 - RESERVE) - 15
    assert plan.engine_pool_bytes == pytest.approx(left / 2 * GIB, abs=MIB)
    assert plan.ram_bytes == pytest.approx(left / 2 * GIB, abs=MIB)
    given = choose_tiers(machine(64), QWEN, is_cpu_engine=True, weights_bytes=15 * GIB, engine_pool_bytes=30 * GIB)
    assert given.engine_pool_bytes == 30 * GIB
    assert given.ram_bytes == pytest.approx((left - 30) * GIB, abs=MIB)


def test_weights_that_are_larger_than_the_memory_leave_nothing() -> None:
    """Neither for the pool nor for a tier, and not less than nothing."""
    plan = choose_tiers(machine(8), QWEN, is_cpu_engine=True, weights_bytes=15 * GIB)
    assert not plan.engine_pool_bytes and plan.ram_bytes == 0


def test_a_cpu_engines_pool_holds_one_text_of_full_length_first() -> None:
    """An engine whose pool is smaller than its longest text does not start: the tier gets less instead."""
    config = models.LLAMA_70B | {"num_hidden_layers": 16}  # 64 KiB a token, 131,072 tokens: 8 GiB
    shape = ModelShape.from_config(config)
    plan = choose_tiers(machine(18), shape, is_cpu_engine=True)
    assert plan.engine_pool_bytes == pytest.approx(8.8 * GIB, rel=0.01)
    assert plan.ram_bytes == pytest.approx((13 - 8.8) * GIB, rel=0.02)
    short = choose_tiers(machine(12), shape, is_cpu_engine=True)
    assert short.ram_bytes == 0 and "lower --max-model-len" in whys(short)


# -- where no tier was requested ----------------------------------------------------------------------------------


def modest(host: Host, shape: ModelShape | None, **options: Any) -> TierPlan:
    return choose_tiers(host, shape, extent=Extent.MODEST, **options)


def test_a_small_model_takes_what_it_can_use() -> None:
    """RAM for as many texts of full length as there are requests, however large the machine, and no disk."""
    shape = replace(QWEN, max_tokens=1024)
    plan = modest(machine(1000, disks=(drive(5000),)), shape, requests=4)
    assert plan.ram_bytes == pytest.approx(1.1 * 4 * shape.load_bytes(1024), abs=MIB)
    assert plan.disk is None and "not requested: give --disk" in whys(plan) and "4 texts" in whys(plan)


@pytest.mark.parametrize("is_cpu", [True, False])
def test_a_large_model_takes_a_quarter_of_what_is_left(is_cpu: bool) -> None:
    """RAM, and a CPU engine's pool, are at most a quarter of the memory that is left, for all engines together."""
    plan = modest(machine(100, disks=(drive(500),)), QWEN, workers=2, is_cpu_engine=is_cpu)
    assert plan.ram_bytes == pytest.approx(12.5 * GIB, abs=MIB) and plan.disk is None
    assert plan.engine_pool_bytes == (pytest.approx(12.5 * GIB, abs=MIB) if is_cpu else None)
    assert modest(machine(100), None).ram_bytes == 25 * GIB


# -- what is left out, and why -------------------------------------------------------------------------------------


def test_a_small_shared_memory_says_how_to_enlarge_it() -> None:
    """Docker's 64 MiB of /dev/shm hold no tier, and the reason names the option that helps."""
    plan = choose_tiers(machine(100, shm_gib=1 / 16, disks=(drive(500),)), QWEN)
    assert (plan.ram_bytes, plan.disk, plan.l2) == (0, None, None)
    assert "--shm-size" in whys(plan)
    bounded = choose_tiers(machine(100, shm_gib=10), QWEN)
    assert bounded.ram_bytes == pytest.approx(9 * GIB - 64 * MIB, abs=MIB)
    assert "/dev/shm" in whys(bounded)


@pytest.mark.parametrize("missing", ["memory", "shared_memory"])
def test_what_can_not_be_found_out_leaves_the_tiers_out(missing: str) -> None:
    """Without knowing what memory there is, none is taken, and the reason says what to give."""
    plan = choose_tiers(replace(machine(100), **{missing: None}), QWEN)
    assert plan.ram_bytes == 0 and "--ram-gib" in whys(plan)


def test_a_model_that_can_not_be_sized_is_no_obstacle() -> None:
    """Tiers are sized by the machine alone then."""
    plan = choose_tiers(machine(100, disks=(drive(100),)), None)
    assert plan.ram_bytes == 80 * GIB and plan.disk is not None
    assert "can't be computed" in whys(plan)


@pytest.mark.parametrize(
    ("disk", "why"),
    [
        (drive(500, read_gb_s=0.15), "computing is faster"),
        (drive(2.5), "less than the minimum of 1.0 GiB"),
        (replace(drive(500), problem="it lies in memory"), "it lies in memory"),
    ],
)
def test_a_disk_that_is_not_worth_it_is_left_out(disk: DiskProbe, why: str) -> None:
    """Slow, small and unusable disks have their reason in the table."""
    plan = choose_tiers(machine(100, disks=(disk,)), LLAMA)
    assert plan.disk is None and plan.ram_bytes > 0
    assert "disk /nvme: left out: " in whys(plan) and why in whys(plan)


def test_of_several_disks_the_largest_that_is_not_slow_is_taken() -> None:
    """A disk half as fast as the fastest may win by its size, a slower one not."""
    fast, large, slow = drive(100, 6.0, "/fast"), drive(900, 3.5, "/large"), drive(9000, 1.0, "/slow")
    plan = choose_tiers(machine(100, disks=(fast, large, slow)), QWEN)
    assert plan.disk is not None and plan.disk.directory == Path("/large")
    assert "disk /fast: left out" in whys(plan) and "disk /slow: left out" in whys(plan)


def test_a_restart_finds_the_same_disk_tier() -> None:
    """What the tier holds counts as its own: the size does not shrink with every start."""
    first = choose_tiers(machine(100, disks=(drive(500),)), QWEN).disk
    assert first is not None
    again = choose_tiers(machine(100, disks=(drive(500 - first.bytes / GIB, held_gib=first.bytes / GIB),)), QWEN).disk
    assert again is not None and again.bytes == pytest.approx(first.bytes, abs=2 * MIB)


def test_a_containers_layer_is_said_to_go_with_it() -> None:
    """A tier in the container's own layer is possible, and its owner is told."""
    plan = choose_tiers(machine(100, disks=(replace(drive(500), medium=Medium.OVERLAY),)), QWEN)
    assert plan.disk is not None and "deleted with the container" in whys(plan)


def test_a_tier_has_no_more_chunks_than_can_be_kept_track_of() -> None:
    """A tiny model's chunks on a large drive are capped by their number."""
    tiny = ModelShape.from_config(models.QWEN_7B | {"num_hidden_layers": 1, "hidden_size": 448})
    plan = choose_tiers(machine(100, disks=(drive(7000),)), tiny)
    assert plan.disk is not None
    assert 0.99 * MAX_CHUNKS < plan.disk.bytes / tiny.chunk_bytes <= MAX_CHUNKS


@pytest.mark.parametrize("who", list(Answerer))
def test_an_l2_is_taken_only_where_one_answers(who: Answerer) -> None:
    """Both daemons are, strangers and nobody are not; each way the table says what was there."""
    url = "sagemaker-hyperpod://127.0.0.1:9200" if who in (Answerer.HOTSPAN, Answerer.HYPERPOD) else None
    plan = choose_tiers(replace(machine(100), daemon=Daemon(who, "127.0.0.1:9200", url)), QWEN)
    assert plan.l2 == url
    assert any(reason.what == "L2" for reason in plan.reasons)
    assert ("L2: none: no answer from 127.0.0.1:9200" in whys(plan)) == (who is Answerer.NOBODY)


# -- for every machine ---------------------------------------------------------------------------------------------

SIZES = st.integers(0, 2000).map(lambda gib: gib * GIB) | st.integers(0, 64 * GIB)
SHAPES = st.sampled_from([None, QWEN, LLAMA, ranks(2), ranks(8), ModelShape.from_config(models.QWEN3_NEXT)])
DISKS = st.builds(
    lambda free, held, rate: replace(drive(0), free_bytes=free, held_bytes=held, read_gb_s=rate),
    *(SIZES, SIZES, st.none() | st.floats(0, 20)),
)


@st.composite
def cases(draw: st.DrawFn) -> "tuple[Host, ModelShape | None, dict[str, int | bool | None]]":
    free = draw(SIZES)
    host = Host(Available(draw(SIZES), "test"), SharedMemory(free * 2, free), tuple(draw(st.lists(DISKS, max_size=3))))
    options: dict[str, int | bool | None] = {
        "workers": draw(st.integers(1, 9)),
        "models": draw(st.integers(1, 3)),
        "is_cpu_engine": draw(st.booleans()),
        "weights_bytes": draw(SIZES),
        "engine_pool_bytes": draw(st.none() | SIZES),
    }
    return host, draw(SHAPES), options


def sharers(options: "dict[str, int | bool | None]") -> int:
    return int(options["workers"] or 1) * int(options["models"] or 1)


@settings(max_examples=300, deadline=None)
@given(cases())
def test_all_workers_together_take_no_more_than_there_is(
    case: "tuple[Host, ModelShape | None, dict[str, int | bool | None]]",
) -> None:
    """Tiers, processes, weights and pools of all workers fit into memory, /dev/shm and disks, with a fifth to spare."""
    host, shape, options = case
    plan = choose_tiers(host, shape, **options)  # type: ignore[arg-type]
    assert host.memory is not None and host.shared_memory is not None
    count = sharers(options)
    if plan.ram_bytes:
        processes = SERVER_BYTES + RANK_BYTES * (shape.tensor_parallel if shape is not None else 1)
        engine = int(options["weights_bytes"] or 0) + (plan.engine_pool_bytes or 0) if options["is_cpu_engine"] else 0
        assert count * (plan.ram_bytes + processes + engine) <= host.memory.bytes
        assert count * (plan.ram_bytes + engine) <= (1 - RESERVE) * host.memory.bytes + MIB
        assert count * plan.ram_bytes <= 0.9 * host.shared_memory.free_bytes
        assert plan.ram_bytes >= MIN_BYTES
        assert shape is None or plan.ram_bytes >= MIN_CHUNKS * shape.chunk_bytes
    else:
        assert plan.disk is None and plan.l2 is None
    if plan.disk is not None:
        assert any(
            count * plan.disk.bytes <= (1 - RESERVE) * (disk.free_bytes + disk.held_bytes) + MIB
            for disk in host.disks
            if disk.problem is None
        )
        assert plan.disk.bytes >= MIN_DISK_BYTES


@settings(max_examples=300, deadline=None)
@given(cases(), SIZES, SIZES, SIZES)
def test_more_of_anything_is_never_less(
    case: "tuple[Host, ModelShape | None, dict[str, int | bool | None]]", memory: int, shared: int, free: int
) -> None:
    """With more memory the RAM tier does not shrink, nor with more /dev/shm; with more disk the disk tier does not."""
    host, shape, options = case
    assert host.memory is not None and host.shared_memory is not None
    disks = tuple(replace(disk, free_bytes=disk.free_bytes + free) for disk in host.disks)
    richer = Host(
        Available(host.memory.bytes + memory, "test"),
        SharedMemory(host.shared_memory.total_bytes + shared, host.shared_memory.free_bytes + shared),
        disks,
    )
    before = choose_tiers(host, shape, **options)  # type: ignore[arg-type]
    after = choose_tiers(richer, shape, **options)  # type: ignore[arg-type]
    assert after.ram_bytes >= before.ram_bytes
    if len(host.disks) == 1:
        assert (after.disk.bytes if after.disk else 0) >= (before.disk.bytes if before.disk else 0)


@settings(deadline=None)
@given(cases(), st.integers(1, 9))
def test_more_workers_never_have_more_each(
    case: "tuple[Host, ModelShape | None, dict[str, int | bool | None]]", more: int
) -> None:
    """A host that is shared by more engines gives each no more; with several disks another one may be chosen."""
    host, shape, options = case
    few = choose_tiers(host, shape, **options)  # type: ignore[arg-type]
    many = choose_tiers(host, shape, **(options | {"workers": int(options["workers"] or 1) + more}))  # type: ignore[arg-type]
    assert many.ram_bytes <= few.ram_bytes
    if len(host.disks) == 1 and few.ram_bytes:
        assert (many.disk.bytes if many.disk else 0) <= (few.disk.bytes if few.disk else 0)


@settings(deadline=None)
@given(cases())
def test_a_modest_plan_takes_no_more_than_one_that_was_asked_for(
    case: "tuple[Host, ModelShape | None, dict[str, int | bool | None]]",
) -> None:
    """Never more RAM than with --auto, never more than a quarter of the memory, and no disk."""
    host, shape, options = case
    asked = choose_tiers(host, shape, **options)  # type: ignore[arg-type]
    plan = modest(host, shape, **options)
    assert host.memory is not None
    assert sharers(options) * plan.ram_bytes <= MODEST * host.memory.bytes and plan.disk is None
    assert plan.ram_bytes <= asked.ram_bytes or options["is_cpu_engine"]  # where the pool is smaller, too


@settings(deadline=None)
@given(cases())
def test_every_choice_has_its_reasons(case: "tuple[Host, ModelShape | None, dict[str, int | bool | None]]") -> None:
    """Each tier, and each disk that was looked at, has a line in the table, without blanks."""
    host, shape, options = case
    plan = choose_tiers(host, shape, **options)  # type: ignore[arg-type]
    assert all(reason.what and reason.value and reason.why for reason in plan.reasons)
    text = whys(plan)
    assert "KV:" in text and "RAM:" in text and "disk" in text
