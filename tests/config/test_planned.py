"""Tiers that are chosen: what somebody named is kept as it is, and only the rest comes from the plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.planned import planned_settings, with_named
from hotspan.config.settings import CacheOptions, CacheSettings, DiskSettings, L2Settings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.plan.tiers import DiskChoice, Reason, TierPlan
from tests.config.rig import configured

REASONS = (
    Reason("memory left", "100.0 GiB", "a test"),
    Reason("RAM", "40.0 GiB", "what memory leaves"),
    Reason("disk /slow", "left out", "slower or smaller than /nvme"),
    Reason("disk /nvme", "300.0 GiB", "an NVMe drive"),
    Reason("L2", "sagemaker-hyperpod://127.0.0.1:9200", "hotspan's daemon answers there"),
)
PLAN = TierPlan(40 * GIB, DiskChoice(Path("/nvme"), 300 * GIB), "sagemaker-hyperpod://127.0.0.1:9200", None, REASONS)
NO_ROOM = TierPlan(0, None, None, None, (Reason("RAM", "none", "/dev/shm leaves 1.0 MiB"),))
NAMED: dict[str, dict[str, Any]] = {
    "ram": {"ram_gib": 7.0},
    "disk": {"disk": Path("/mine"), "disk_gib": 9.0},
    "l2": {"l2": "redis://:secret@cache:6379", "l2_option": {"timeout_s": "1"}},
}


def settings(*names: str) -> CacheSettings:
    told: dict[str, Any] = {"ram_gib": None}
    for name in names:
        told |= NAMED[name]
    return CacheOptions(**told).settings()


@given(st.sets(st.sampled_from(sorted(NAMED))))
def test_what_is_named_is_kept(names: set[str]) -> None:
    """Whatever is named beside --auto stays to the last option; everything else is the plan's; the table says both."""
    told = settings(*names)
    plan = with_named(PLAN, told)
    assert planned_settings(told, plan) == planned_settings(told, PLAN)
    done = planned_settings(told, plan)
    assert done is not None
    assert done.ram_bytes == (7 if "ram" in names else 40) * GIB == plan.ram_bytes
    assert done.disk == (DiskSettings("/mine", 9 * GIB) if "disk" in names else DiskSettings("/nvme", 300 * GIB))
    assert done.l2 == (told.l2 if "l2" in names else L2Settings("sagemaker-hyperpod://127.0.0.1:9200"))
    assert plan.disk is not None and done.disk is not None and plan.disk.bytes == done.disk.bytes
    assert done.l2 is not None and plan.l2 == done.l2.url
    told_of = [(reason.what, reason.value) for reason in plan.reasons if reason.why == "as given"]
    expected = {
        "ram": ("RAM", "7.0 GiB"),
        "disk": ("disk /mine", "9.0 GiB"),
        "l2": ("L2", "redis://:***@cache:6379"),
    }
    assert sorted(told_of) == sorted(expected[name] for name in names)
    rows = [reason.what.partition(" ")[0] for reason in plan.reasons]
    assert rows.count("RAM") == rows.count("L2") == 1 and rows.count("disk") == (1 if "disk" in names else 2)


def test_nothing_leaves_memory() -> None:
    """With --persistence none only the RAM tier is chosen."""
    done = planned_settings(replace(settings(), persistence="none"), PLAN)
    assert done is not None and done.ram_bytes == 40 * GIB and done.disk is None is done.l2


def test_without_room() -> None:
    """Without room for RAM no tier is chosen; a disk or an L2 that was named is an error, and named RAM is believed."""
    assert planned_settings(settings(), NO_ROOM) is None
    for name in ("disk", "l2"):
        with pytest.raises(ConfigError, match=rf"--{name} is given, .*no room \(/dev/shm leaves 1.0 MiB\).*--ram-gib"):
            planned_settings(settings(name), with_named(NO_ROOM, settings(name)))
    told = settings("ram", "l2")
    assert planned_settings(told, with_named(NO_ROOM, told)) == told


@pytest.mark.parametrize(
    ("flags", "ram_gib"),
    [
        ({}, 0),
        ({"auto": "true"}, 0),
        ({"auto": "true", "l2": "redis://a"}, 0),
        ({"auto": "true", "disk": "/x", "disk_gib": "9"}, 0),
        ({"auto": "true", "ram_gib": "3"}, 3),
        ({"auto": "true", "ram_gib": "4"}, 4),
        ({"l2": "redis://a"}, 4),
        ({"ram_gib": "3"}, 3),
    ],
)
def test_which_ram_is_to_be_chosen(flags: dict[str, str], ram_gib: int) -> None:
    """RAM is chosen if nobody named it, and --auto is given or no other tier is named; else its default counts."""
    cache = configured(flags=flags).cache
    assert cache is not None and cache.ram_bytes == ram_gib * GIB
