"""Options as fields of dataclasses: name, kind, default and help are declared once."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from hotspan.bench.config import BenchConfig, StorageBench
from hotspan.bench.workloads import WORKLOADS
from hotspan.cli.admin_client import StatsOptions
from hotspan.cli.bench import Output, ReportOptions
from hotspan.cli.cache import CheckOptions, ClearOptions, RemoveOptions
from hotspan.cli.controls import LookupOptions, PinOptions, PrefetchOptions
from hotspan.cli.deploy import RayOptions
from hotspan.cli.invalidate import InvalidateOptions
from hotspan.cli.keys import InitOptions, ListOptions, RotateOptions, ShredOptions
from hotspan.cli.plan import PlanOptions
from hotspan.cli.simulate import SimulateOptions
from hotspan.config.kinds import COUNT, PAIRS, Kind
from hotspan.config.options import Option, Spelling, build, check, names, option, options_of
from hotspan.config.server_settings import ServerSettings
from hotspan.config.settings import CacheOptions
from hotspan.core.errors import ConfigError
from hotspan.daemon.options import DaemonOptions
from hotspan.demo.plan import DemoRequest
from hotspan.router.ray.plan import Launch, Plan
from hotspan.router.settings import RouterSettings

COMMANDS: Mapping[str, tuple[type, ...]] = {
    "serve": (CacheOptions, ServerSettings),
    "route": (RouterSettings,),
    "daemon": (DaemonOptions,),
    "deploy ray": (RayOptions, Plan, Launch),
    "bench engine": (Output, BenchConfig),
    "bench report": (ReportOptions,),
    "bench storage": (StorageBench,),
    **{f"bench engine {name}": (kind,) for name, kind in WORKLOADS.items()},
    "demo": (DemoRequest,),
    "simulate": (SimulateOptions,),
    "plan": (PlanOptions,),
    "cache stats": (StatsOptions,),
    "cache check": (CheckOptions,),
    "cache clear": (ClearOptions,),
    "cache remove": (RemoveOptions,),
    "cache health": (StatsOptions,),
    "cache invalidate": (InvalidateOptions,),
    "cache lookup": (LookupOptions,),
    "cache pin": (PinOptions,),
    "cache prefetch": (PrefetchOptions,),
    "keys init": (InitOptions,),
    "keys rotate": (RotateOptions,),
    "keys shred": (ShredOptions,),
    "keys list": (ListOptions,),
}


@dataclass(frozen=True, kw_only=True)
class Health:
    interval_s: float = option(2.0, "Seconds.", name="health_interval_s")


@dataclass(frozen=True, kw_only=True)
class Example:
    size: int = option(MISSING, "Size.", kind=COUNT)
    disk: Path | None = option(None, "Directory.", lmi=names("option.disk_path", Spelling("gb", COUNT)))
    order: Literal["even", "odd"] = option("even", "Order.")
    labels: Mapping[str, str] = option({}, "Labels.", kind=PAIRS)
    health: Health = field(default_factory=Health)
    internal: int = 7


def declared(command: str) -> list[Option]:
    return [each for settings in COMMANDS[command] for each in options_of(settings)]


def test_names_and_kinds_follow_from_fields() -> None:
    """A field's name and type are the option's; nested dataclasses bring theirs; other fields are no options."""
    found = {each.name: each for each in options_of(Example, "x_", "Panel")}
    assert list(found) == ["x_size", "x_disk", "x_order", "x_labels", "x_health_interval_s"]
    assert [each.kind.name for each in found.values()] == ["count", "path", "even or odd", "NAME=VALUE", "number"]
    assert found["x_size"].default is MISSING and found["x_size"].flag == "--x-size"
    assert found["x_disk"].lmi == (Spelling("option.disk_path"), Spelling("gb", COUNT))
    assert {each.panel for each in found.values()} == {"Panel"}


def test_values_become_the_dataclass() -> None:
    """Values are taken by the options' names, paths of a home directory included; defaults stand for the rest."""
    done = build(Example, {"x_size": 3, "x_disk": "~/kv", "x_health_interval_s": 5.0, "nobodys": 1}, "x_", internal=8)
    assert done == Example(size=3, disk=Path("~/kv").expanduser(), health=Health(interval_s=5.0), internal=8)
    assert build(Example, {"size": 1}).labels == {}


@pytest.mark.parametrize(("given", "flag"), [({"size": 0}, "--size"), ({"size": 1, "order": "both"}, "--order")])
def test_values_of_code_are_checked(given: dict[str, object], flag: str) -> None:
    """`check` refuses what a source could not have given, by the flag."""
    with pytest.raises(ConfigError, match=flag):
        check(Example(**given))  # type: ignore[arg-type]
    check(Example(size=1))


@pytest.mark.parametrize("command", COMMANDS)
def test_each_default_is_a_value_of_its_option(command: str) -> None:
    """What a command's help shows as a default can be written; each option has a help and a name of its own."""
    options = declared(command)
    assert len({each.name for each in options}) == len(options)
    for each in options:
        assert isinstance(each.kind, Kind) and each.help
        if each.default not in (MISSING, None, "", (), {}):
            written = list(each.default) if isinstance(each.default, tuple) else each.kind.write(each.default)
            read = each.kind.parse(written, each.flag)
            assert type(each.default)(read) == each.default, each.name
