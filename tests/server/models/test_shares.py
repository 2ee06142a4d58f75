"""One machine shared by several models: nothing is promised twice, and what a model's own files say is its own."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.config.configuration import Configuration, load_configuration
from hotspan.config.own import CommandLine
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.plan.disk import DiskProbe
from hotspan.plan.host import Host
from hotspan.plan.memory import Available, SharedMemory
from hotspan.plan.mounts import Medium
from hotspan.server.models import shares as module
from hotspan.server.models.shares import Share, shares, split_devices, visible_devices

DISK = DiskProbe(Path("/nvme/kv"), "ext4", Medium.NVME, 500 * GIB)


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_room", lambda size: None)


def host(memory_gib: float = 100, asked: list[bool] | None = None) -> Callable[[bool], Host]:
    def look(has_disks: bool) -> Host:
        if asked is not None:
            asked.append(has_disks)
        disks = (DISK,) if has_disks else ()
        size = int(memory_gib * GIB)
        return Host(Available(size, "a test"), SharedMemory(size, size), disks)

    return look


def configured(
    directory: Path, properties: Mapping[str, str], *words: str, flags: Mapping[str, Any] | None = None, gpus: int = 0
) -> tuple[dict[str, Configuration], Configuration]:
    """The configurations of models with these serving.properties, and what is common."""
    own = {}
    for name, text in properties.items():
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "serving.properties").write_text(text)
        line = CommandLine(str(directory / name), dict(flags or {}), words)
        own[name] = load_configuration(line, {}, gpus=gpus)
    return own, load_configuration(CommandLine(str(directory), dict(flags or {}), words), {})


def ram(share: Share) -> float:
    assert share.cache is not None
    return share.cache.ram_bytes / GIB


def test_what_is_said_for_all_is_a_total(tmp_path: Path) -> None:
    """--ram-gib and --disk are divided; each model has a directory of its own; no plan is made."""
    flags = {"ram_gib": "8", "disk": "/nvme/kv", "disk_gib": "100", "l2": "redis://cache:6379"}
    own, common = configured(tmp_path, {"a": "", "b": ""}, "--kv-cache-memory-bytes", "1000000", flags=flags)
    asked: list[bool] = []
    split = shares(own, common, (), host(asked=asked))
    assert [ram(share) for share in split.values()] == [4, 4] and asked == [False]
    disks = [share.cache.disk for share in split.values() if share.cache and share.cache.disk]
    assert [(disk.directory, disk.bytes / GIB) for disk in disks] == [("/nvme/kv/a", 50), ("/nvme/kv/b", 50)]
    assert all(share.cache and share.cache.l2 and not share.plan and not share.engine for share in split.values())


def test_a_models_own_tiers_stay_its_own(tmp_path: Path) -> None:
    """Tiers in a serving.properties are that model's; the others share what is left of what is common, or planned."""
    own, common = configured(tmp_path, {"a": "option.ram_gib=20\noption.disk=/fast/a\noption.disk_gib=7", "b": ""})
    split = shares(own, common, (), host(100))
    assert ram(split["a"]) == 20 and split["a"].cache and split["a"].cache.disk
    assert split["a"].cache.disk.directory == "/fast/a" and split["a"].plan is None
    assert split["b"].plan is not None and split["b"].cache and split["b"].cache.disk is None, "nobody asked for one"
    assert 0 < ram(split["b"]) < (100 - 20) / 2


def test_chosen_beside_what_is_named(tmp_path: Path) -> None:
    """With --auto, what is named stays, a model's own as it is and the common one divided; the plan has the rest."""
    own, common = configured(
        tmp_path, {"a": "option.ram_gib=20", "b": "option.disk=/fast/b\noption.disk_gib=7"}, flags={"auto": "true"}
    )
    split = shares(own, common, (), host(100))
    a, b = split["a"].cache, split["b"].cache
    assert a and a.disk and b and b.disk and split["a"].plan and split["b"].plan
    assert ram(split["a"]) == 20 and a.disk.directory == "/nvme/kv/a"
    assert (b.disk.directory, b.disk.bytes) == ("/fast/b", 7 * GIB) and 0 < ram(split["b"]) < (100 - 20) / 2
    assert split["a"].plan.ram_bytes == a.ram_bytes
    flags = {"auto": "true", "disk": "/common", "disk_gib": "100", "l2": "redis://cache:6379"}
    own, common = configured(tmp_path, {"a": "", "b": ""}, flags=flags)
    for name, share in shares(own, common, (), host(100)).items():
        assert share.cache and share.cache.disk and share.cache.l2 and share.cache.l2.url == "redis://cache:6379"
        assert (share.cache.disk.directory, share.cache.disk.bytes) == (f"/common/{name}", 50 * GIB)
    with pytest.raises(ConfigError, match=r"the model a: --disk is given.* no room"):
        shares(own, common, (), host(0.1))


def test_two_models_never_have_one_directory(tmp_path: Path) -> None:
    """The same disk in two models' files is an error that names both."""
    text = "option.disk=/nvme/kv\noption.disk_gib=7"
    own, common = configured(tmp_path, {"a": text, "b": text})
    with pytest.raises(ConfigError, match="a and b both have /nvme/kv"):
        shares(own, common, (), host())


def test_without_tiers(tmp_path: Path) -> None:
    """--no-cache is for all, option.no_cache for one."""
    own, common = configured(tmp_path, {"a": "option.no_cache=true", "b": ""})
    split = shares(own, common, (), host())
    assert split["a"].cache is None and split["b"].cache is not None
    own, common = configured(tmp_path, {"a": "", "b": ""}, flags={"no_cache": True})
    assert [share.cache for share in shares(own, common, (), host()).values()] == [None, None]


@given(models=st.integers(2, 6), gib=st.floats(1, 2000), own_gib=st.floats(0.1, 30))
def test_all_together_never_take_more_than_there_is(
    models: int, gib: float, own_gib: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """RAM tiers and CPU engines' pools add up to less than the memory, however many models there are."""
    properties = {f"m{number}": "" for number in range(models)} | {"m0": f"option.ram_gib={own_gib}"}
    own, common = configured(tmp_path_factory.getbasetemp(), properties)
    split = shares(own, common, (), host(gib))
    taken = 0
    for share in split.values():
        taken += share.cache.ram_bytes if share.cache else 0
        words = dict(zip(share.engine[::2], share.engine[1::2], strict=True))
        taken += int(words.get("--kv-cache-memory-bytes", 0))
    assert taken <= max(gib, own_gib) * GIB
    disks = sum(share.cache.disk.bytes for share in split.values() if share.cache and share.cache.disk)
    assert disks <= DISK.free_bytes


def test_gpus_of_their_own_or_shared(tmp_path: Path) -> None:
    """While there are enough, models have GPUs of their own; else all see all, and share the memory that vLLM takes."""
    own, common = configured(tmp_path, {"a": "option.tensor_parallel_degree=2", "b": "option.dtype=bf16"}, gpus=8)
    split = shares(own, common, tuple("01234567"), host())
    assert (split["a"].devices, split["b"].devices) == (("0", "1"), ("2", "3", "4", "5"))
    assert split["a"].engine == split["b"].engine == ()
    own, common = configured(tmp_path, {"a": "", "b": "option.gpu_memory_utilization=0.3"}, gpus=1)
    split = shares(own, common, ("0",), host())
    assert [share.devices for share in split.values()] == [None, None]
    assert split["a"].engine == ("--gpu-memory-utilization", "0.450") and split["b"].engine == ()


@given(st.integers(0, 16), st.lists(st.one_of(st.none(), st.integers(1, 8)), min_size=1, max_size=6))
def test_devices_are_given_once(count: int, wanted: list[int | None]) -> None:
    """No device is given to two models; each gets what it was told to take, or a power of two; None if they lack."""
    devices = [str(number) for number in range(count)]
    split = split_devices(devices, wanted)
    least = sum(1 if number is None else number for number in wanted)
    if split is None:
        assert least > count or not devices
        return
    given_out = [device for group in split for device in group]
    assert len(set(given_out)) == len(given_out) and set(given_out) <= set(devices)
    for number, group in zip(wanted, split, strict=True):
        assert len(group) == number or (number is None and len(group).bit_count() == 1)


def test_devices_that_are_visible() -> None:
    """The names are those of CUDA_VISIBLE_DEVICES; an empty one, or -1, hides all."""
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "3, GPU-ab"}) == ("3", "GPU-ab")
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == visible_devices({"CUDA_VISIBLE_DEVICES": "-1"}) == ()
