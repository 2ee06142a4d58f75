"""Divides one machine between several models: memory, disk and GPUs, before any of them starts.

What was said for all (the command line, variables, --config) is a total that the models share equally. What a model's
own files say is that model's. Where nobody said anything, hotspan.plan does, for as many models as there are.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hotspan.config.configuration import Configuration, visible_gpus
from hotspan.config.origin import Settings
from hotspan.config.planned import planned_settings, with_named
from hotspan.config.settings import CacheSettings
from hotspan.core.errors import ConfigError
from hotspan.core.shared_memory import check_room
from hotspan.plan.host import Host
from hotspan.plan.shape import ModelShape
from hotspan.plan.tiers import Extent, TierPlan, choose_tiers
from hotspan.plan.weights import model_directory, weights_bytes

DEVICES = "CUDA_VISIBLE_DEVICES"

_UTILIZATION = 0.9
"""Of a GPU's memory, for all engines on it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one model gets.

    cache:   its tiers; None is to serve without.
    engine:  words for its engine.
    devices: the GPUs that it sees; None is what this process sees.
    plan:    how the tiers were chosen, where not all were named.
    """

    cache: CacheSettings | None
    engine: tuple[str, ...] = ()
    devices: tuple[str, ...] | None = None
    plan: TierPlan | None = None


def shares(
    models: Mapping[str, Configuration], common: Configuration, devices: Sequence[str], host: Callable[[bool], Host]
) -> dict[str, Share]:
    """Each model's share.

    common:  what holds for all models.
    devices: the GPUs, by the names that CUDA_VISIBLE_DEVICES has for them; none is a CPU engine.
    host:    looks at the machine, at its disks only if told so; asked at most once.
    Raises:  ConfigError if the tiers that were named can't be had together.
    """
    named = {name: _named(name, own, common, len(models)) for name, own in models.items()}
    is_planned = any(_is_planned(own) for own in models.values())
    taken = sum(cache.ram_bytes for cache in named.values() if cache is not None)
    if taken:
        check_room(taken)
    _check_disks(named)
    split = split_devices(devices, [_wanted_devices(own) for own in models.values()])
    plans: dict[str, TierPlan] = {}
    if not devices or is_planned:
        left = _without(host(any(own.extent is Extent.ALL for own in models.values())), taken)
        for (name, own), mine in zip(models.items(), split or [tuple(devices)] * len(models), strict=True):
            plans[name] = _plan(left, own, len(models), mine)
    result = {}
    for place, (name, own) in enumerate(models.items()):
        plan = plans.get(name)
        engine = _engine_words(own, plan, len(models), is_gpu_shared=bool(devices) and split is None)
        share = Share(named[name], engine, split[place] if split else None)
        result[name] = _planned(name, share, plan) if plan is not None and _is_planned(own) else share
    return result


def _is_planned(own: Configuration) -> bool:
    """Whether its tiers are to be chosen."""
    return own.cache is not None and own.extent is not None


# -- tiers that somebody named -------------------------------------------------------------------------------------


def _named(name: str, own: Configuration, common: Configuration, models: int) -> CacheSettings | None:
    """The tiers of one model: its own as they are, its part of those that all share."""
    if own.cache is None:
        return None
    cache = own.cache
    if not _is_own("ram_gib", own, common):
        cache = replace(cache, ram_bytes=cache.ram_bytes // models)
    if cache.disk is not None:
        disk = cache.disk
        if not _is_own("disk", own, common):
            disk = replace(disk, directory=str(Path(disk.directory) / name))
        if not _is_own("disk_gib", own, common):
            disk = replace(disk, bytes=disk.bytes // models)
        cache = replace(cache, disk=disk)
    return cache


def _is_own(key: str, own: Configuration, common: Configuration) -> bool:
    """Whether the value of a key comes from the model's own files."""
    return own.settings[key].given != common.settings[key].given


def _check_disks(named: Mapping[str, CacheSettings | None]) -> None:
    owners: dict[str, str] = {}
    for name, cache in named.items():
        if cache is None or cache.disk is None:
            continue
        other = owners.setdefault(cache.disk.directory, name)
        if other != name:
            raise ConfigError(
                f"{other} and {name} both have {cache.disk.directory} as their disk tier: give each its own in its "
                "serving.properties, or one for all with --disk, which each has a directory in"
            )


# -- tiers that nobody named ---------------------------------------------------------------------------------------


def _plan(host: Host, own: Configuration, models: int, devices: Sequence[str]) -> TierPlan:
    shape, weights = None, 0
    settings = own.settings
    ranks = len(devices) if _is_max(settings) else settings.count("tensor_parallel_size", 1)
    with contextlib.suppress(ConfigError, OSError):  # a model that is not here yet: the machine alone decides
        directory = model_directory(own.model)
        weights = weights_bytes(directory)
        shape = ModelShape.from_config(
            directory,
            kv_dtype=str(settings.value("kv_cache_dtype") or "auto"),
            dtype=str(settings.value("dtype") or "auto"),
            tensor_parallel=max(1, ranks),
        )
        most = settings.count("max_model_len", 0)
        if most:
            shape = replace(shape, max_tokens=most)
    pool = settings.count("kv_cache_memory_bytes", 0)
    workers = settings.count("data_parallel_size", 1)
    return choose_tiers(
        host,
        shape,
        workers=workers,
        models=models,
        is_cpu_engine=not devices,
        weights_bytes=weights,
        engine_pool_bytes=pool or None,
        requests=settings.count("max_num_seqs", 0) or None,
        extent=own.extent or Extent.ALL,
    )


def _planned(name: str, share: Share, plan: TierPlan) -> Share:
    """The share with the tiers of the plan where none are named. Raises: ConfigError, as `planned_settings`."""
    if share.cache is None:
        return share
    if plan.disk is not None:
        plan = replace(plan, disk=replace(plan.disk, directory=plan.disk.directory / name))
    plan = with_named(plan, share.cache)
    try:
        return replace(share, cache=planned_settings(share.cache, plan), plan=plan)
    except ConfigError as error:
        raise ConfigError(f"the model {name}: {error}") from error


def _without(host: Host, taken: int) -> Host:
    """The machine without what other models take."""
    memory, shared = host.memory, host.shared_memory
    if memory is not None:
        memory = replace(memory, bytes=max(0, memory.bytes - taken))
    if shared is not None:
        shared = replace(shared, free_bytes=max(0, shared.free_bytes - taken))
    return replace(host, memory=memory, shared_memory=shared)


# -- what the engines take -----------------------------------------------------------------------------------------


def _engine_words(own: Configuration, plan: TierPlan | None, models: int, *, is_gpu_shared: bool) -> tuple[str, ...]:
    """Options for its part of the engines' own memory, unless the user gave some."""
    if any(name in own.settings for name in ("kv_cache_memory_bytes", "gpu_memory_utilization")):
        return ()
    if is_gpu_shared:
        return ("--gpu-memory-utilization", f"{_UTILIZATION / models:.3f}")
    if plan is not None and plan.engine_pool_bytes:
        return ("--kv-cache-memory-bytes", str(plan.engine_pool_bytes))
    return ()


def _wanted_devices(own: Configuration) -> int | None:
    """The number of GPUs that a model is configured for; None for as many as possible."""
    settings = own.settings
    if _is_max(settings):
        return None
    degrees = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    wanted = 1
    for degree in degrees:
        wanted *= settings.count(degree, 1)
    return wanted


def _is_max(settings: Settings) -> bool:
    setting = settings.get("tensor_parallel_size")
    return setting is not None and "max" in (str(setting.given.text).lower(), str(setting.value).lower())


# -- GPUs: of their own while there are enough, shared otherwise ---------------------------------------------------


def visible_devices(surroundings: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the GPUs that this process may use, as CUDA_VISIBLE_DEVICES has them."""
    visible = surroundings.get(DEVICES)
    if visible is None:
        return tuple(str(number) for number in range(visible_gpus(surroundings)))
    return tuple(name for device in visible.split(",") if (name := device.strip()) not in ("", "-1"))


def split_devices(devices: Sequence[str], wanted: Sequence[int | None]) -> list[tuple[str, ...]] | None:
    """Each model's own devices; None if there are not enough, so that the models share all of them.

    wanted: how many each was told to take; None for as many as can be, the same power of two for each of these.
    """
    greedy = wanted.count(None)
    left = len(devices) - sum(number or 0 for number in wanted)
    if left < greedy or not devices:
        return None
    most = 1 << ((left // greedy).bit_length() - 1) if greedy else 0
    split, at = [], 0
    for number in wanted:
        end = at + (most if number is None else number)
        split.append(tuple(devices[at:end]))
        at = end
    return split
