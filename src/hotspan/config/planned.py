"""The tiers that settings name, and those that are chosen for what they leave open (plan/tiers.py)."""

from dataclasses import replace
from pathlib import Path

from hotspan.config.origin import shown
from hotspan.config.settings import CacheSettings, DiskSettings, L2Settings
from hotspan.core.errors import ConfigError
from hotspan.core.types import GIB
from hotspan.plan.tiers import DiskChoice, Reason, TierPlan

_AS_GIVEN = "as given"


def with_named(plan: TierPlan, settings: CacheSettings) -> TierPlan:
    """The plan with the tiers that `settings` name in the place of those that it chose, also in its reasons."""
    named = {}
    if settings.ram_bytes:
        plan = replace(plan, ram_bytes=settings.ram_bytes)
        named["RAM"] = Reason("RAM", _size(settings.ram_bytes), _AS_GIVEN)
    if settings.persistence == "none":
        plan = replace(plan, disk=None, l2=None)
        named |= {what: Reason(what, "none", "persistence is none") for what in ("disk", "L2")}
    if "disk" in settings.without:
        plan = replace(plan, disk=None)
        named["disk"] = Reason("disk", "none", "--no-disk is given")
    if "l2" in settings.without:
        plan = replace(plan, l2=None)
        named["L2"] = Reason("L2", "none", "--no-l2 is given")
    if settings.disk is not None:
        directory, size = settings.disk.directory, settings.disk.bytes
        plan = replace(plan, disk=DiskChoice(Path(directory), size))
        named["disk"] = Reason(f"disk {directory}", _size(size), _AS_GIVEN)
    if settings.l2 is not None:
        plan = replace(plan, l2=settings.l2.url)
        named["L2"] = Reason("L2", shown("l2", settings.l2.url), _AS_GIVEN)
    kept = (reason for reason in plan.reasons if reason.what.partition(" ")[0] not in named)
    return replace(plan, reasons=(*kept, *named.values()))


def planned_settings(settings: CacheSettings, plan: TierPlan) -> CacheSettings | None:
    """The settings with the tiers of the plan where they name none; None if there is no room for any.

    Raises: ConfigError if they name a tier below RAM and there is no room for RAM.
    """
    ram_bytes = settings.ram_bytes or plan.ram_bytes
    if not ram_bytes:
        if settings.disk is None and settings.l2 is None:
            return None
        given = "--disk" if settings.disk is not None else "--l2"
        why = next((reason.why for reason in plan.reasons if reason.what == "RAM"), "none can be chosen")
        raise ConfigError(
            f"{given} is given, and chunks pass through a RAM tier on their way there, for which there is no room "
            f"({why}): make room, name its size with --ram-gib, or leave {given} out"
        )
    settings = replace(settings, ram_bytes=ram_bytes)
    if settings.persistence == "none":
        return settings
    has_disk, has_l2 = (tier not in settings.without for tier in ("disk", "l2"))
    chosen = DiskSettings(str(plan.disk.directory), plan.disk.bytes) if plan.disk is not None and has_disk else None
    l2 = L2Settings(plan.l2) if plan.l2 is not None and has_l2 else None
    return replace(settings, disk=settings.disk or chosen, l2=settings.l2 or l2)


def _size(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
