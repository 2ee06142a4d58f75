"""docs/sizing.md says what the code does."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hotspan.core.types import GIB, MIB, Tier
from hotspan.plan import disk, tiers
from hotspan.plan.advice import advise
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import choose_tiers

from . import models
from .models import drive, machine

DOC = (Path(__file__).parents[2] / "docs" / "sizing.md").read_text()
SHAPE = ModelShape.from_config(models.QWEN_7B)


def row(begins: str) -> str:
    """The second cell of the row of a table that begins so."""
    (line,) = [line for line in DOC.splitlines() if line.startswith(f"| {begins}")]
    return line.split("|")[2].strip()


def test_the_example_is_what_the_code_chooses() -> None:
    """Every figure of the worked example comes out of the plan of that machine."""
    plan = choose_tiers(machine(64, disks=(drive(500, 6.0),)), SHAPE)
    assert f"= {SHAPE.kv_bytes_per_token:,} bytes" in row("a token")
    assert f"{SHAPE.chunk_bytes / MIB:.1f} MiB" in row("a token")
    reserve = next(reason for reason in plan.reasons if reason.what == "reserve")
    assert row("memory kept free") == f"{reserve.value}, a fifth (the processes need 5.0 GiB)"
    assert "5.0 GiB" in reserve.why
    advice = advise(plan, SHAPE, users=1000, tokens=10_240, gb_s={Tier.DISK: 6.0}, prefill_tokens_per_s=8000)
    ram, on_disk = advice.holdings
    assert row("RAM tier") == f"{ram.bytes / GIB:.1f} GiB: {ram.tokens:,} tokens"
    assert row("disk tier") == f"{on_disk.bytes / GIB:.1f} GiB: {on_disk.tokens:,} tokens"
    assert row("1,000 users") == (
        f"{advice.working_set_bytes / GIB:.1f} GiB: {ram.hit_rate * 100:.0f} % are found in RAM, "
        f"{on_disk.hit_rate * 100:.0f} % more on the disk"
    )
    assert row("a text from a disk") == (
        f"{on_disk.load_s:.2f} s; at 8,000 tokens a second computing it takes {advice.compute_s:.2f} s"
    )


def test_the_limits_are_the_codes() -> None:
    """Reserves, floors and what is measured stand in the text as they stand in the code."""
    assert tiers.RESERVE == 0.2
    assert tiers.MODEST == 0.25 and "at most a quarter\nof the memory that is left" in DOC
    assert f"the KV of {tiers.USUAL_REQUESTS} texts" in DOC
    assert f"{tiers.SERVER_BYTES // GIB} GiB an engine and {tiers.RANK_BYTES // GIB} GiB a rank" in DOC
    assert f"a fifth, or {tiers.DISK_RESERVE_BYTES // GIB} GiB" in DOC
    assert f"a tenth, and {tiers.SHARED_RANK_BYTES // MIB} MiB a rank" in DOC
    assert f"fewer than {tiers.MIN_CHUNKS} chunks, a RAM tier below {tiers.MIN_BYTES // MIB} MiB" in DOC
    assert f"a disk tier below {tiers.MIN_DISK_BYTES // GIB} GiB" in DOC
    assert f"{tiers.MAX_CHUNKS:,} chunks" in DOC
    assert f"less than {tiers.MIN_READ_GB_S} GB/s" in DOC
    assert f"at most {disk.MAX_WRITTEN // MIB} MiB, {disk._IO_BYTES // MIB} MiB an I/O" in DOC
    assert f"at most {disk._PASS_S} s each way" in DOC
    floor = tiers.MIN_READ_GB_S * 1e9 / SHAPE.kv_bytes_per_token
    said = re.search(r"some ([\d,]+) tokens a second", DOC)
    assert said is not None and float(said[1].replace(",", "")) == pytest.approx(floor, rel=0.02)


@pytest.mark.parametrize(
    ("begins", "memory", "ranks", "free"),
    [
        ("100 GiB of memory left", 100, 2, None),
        ("500 GiB of disk", 100, 2, 500),
        ("200 GiB left", 200, 4, None),
        ("28 GiB left", 28, 1, None),
        ("a disk with 60 GiB free", 100, 1, 60),
    ],
)
def test_the_comparison_is_what_the_code_chooses(begins: str, memory: int, ranks: int, free: int | None) -> None:
    """hotspan's column beside LMI's is what it would choose there."""
    (line,) = [line for line in DOC.splitlines() if line.startswith(f"| {begins}")]
    ours = float(re.findall(r"[\d.]+", line.split("|")[3])[0])
    shape = replace(SHAPE, tensor_parallel=ranks)
    plan = choose_tiers(machine(memory, disks=() if free is None else (drive(free),)), shape)
    size = plan.ram_bytes if free is None else (plan.disk.bytes if plan.disk else 0)
    assert ours == pytest.approx(size / GIB, rel=0.003)
