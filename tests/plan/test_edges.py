"""Edges of planning that no other test of this package stands on (`make mutants` found them)."""

from pathlib import Path

import pytest

from hotspan.core.types import GIB, Tier
from hotspan.plan.machines import EFFICIENCY, machine
from hotspan.plan.mounts import Medium, read_mounts
from hotspan.plan.rates import estimated

RIGHT = "22 1 8:1 / /data rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro"


def test_ranks_compute_together() -> None:
    """Eight ranks prefill eight times as fast as one; without weights nothing is known."""
    found = machine("p5.48xlarge")
    one = found.prefill_tokens_per_s(10**9, 1)
    assert one is not None and found.prefill_tokens_per_s(10**9, 8) == pytest.approx(8 * one)
    assert found.prefill_tokens_per_s(2 * 10**9, 1) == pytest.approx(one / 2)
    assert one == pytest.approx(found.gpu.tflops * 1e12 * EFFICIENCY / 10**9)
    assert found.prefill_tokens_per_s(0, 1) is None


def test_ranks_load_together() -> None:
    """Each GPU of a machine has a link of its own to the host's memory."""
    found = machine("p5.48xlarge")
    one, eight = (estimated(found, 0, ranks).gb_s[Tier.RAM] for ranks in (1, 8))
    assert one == found.gpu.host_gb_s and eight == 8 * one


def test_a_rank_among_several_keeps_half_a_gib_more() -> None:
    """For its peers, beside the quarter that each rank keeps: the published pools are these (docs/sizing.md)."""
    found = machine("p5.48xlarge")
    own = int(0.5 * found.gpu.memory_gib * GIB)
    assert found.pool_bytes(0, 1, 0.5) == own - GIB // 4
    assert found.pool_bytes(0, 2, 0.5) == pytest.approx(2 * (own - GIB // 4 - GIB // 2), abs=1)


@pytest.mark.parametrize(
    "line",
    [
        "22 1 8:1 / /data rw,relatime shared:1",  # no dash
        "22 1 8:1 / /data - ext4 /dev/sda1 rw",  # no options of the mount
        "22 1 8:1 / /data rw - ext4 /dev/sda1",  # none of the file system
        "",
        "- - -",
    ],
)
def test_a_line_that_is_no_mount_is_passed_over(line: str, tmp_path: Path) -> None:
    """And the others are read."""
    file = tmp_path / "mountinfo"
    file.write_text(f"{line}\n{RIGHT}\n{line}\n")
    (found,) = read_mounts(file)
    assert found.point == "/data" and found.kind == "ext4" and "errors=remount-ro" in found.options


def test_a_machine_that_is_only_named_has_direct_i_o() -> None:
    """Its drives are planned for as those of a file system that takes O_DIRECT, with all of their bytes free."""
    (drive,) = machine("p5.48xlarge").host().disks
    assert drive.is_direct and drive.held_bytes == 0 and drive.medium is Medium.NVME
