"""`hotspan route`: one address for several replicas, each request to where it costs least."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.cli.admin_client import Admin, reading
from hotspan.cli.options import built, runs, takes
from hotspan.cli.output import Printing, explained, print_json, stdout_console
from hotspan.config.admin_token import given_token
from hotspan.config.environment import environment
from hotspan.config.options import option, options_of
from hotspan.config.secrets import read_private
from hotspan.config.tenants import load_tenants, read_api_key
from hotspan.core.addresses import is_loopback
from hotspan.core.errors import ConfigError
from hotspan.router.routes import DRAIN, REPLICAS, RESUME
from hotspan.router.settings import RouterSettings
from hotspan.router.types import Strategy

route = typer.Typer(invoke_without_command=True)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RouterAdmin(Admin):
    """Calls a router as Admin calls a server."""

    server: str = option("http://127.0.0.1:8000", "URL of the router.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaOptions:
    """Which router."""

    admin: RouterAdmin = field(default_factory=RouterAdmin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasOptions(Printing):
    """Which router, and how its answer is printed."""

    admin: RouterAdmin = field(default_factory=RouterAdmin)


ReplicaUrl = Annotated[str, typer.Argument(help="URL of the replica, as the router has it: `hotspan route replicas`.")]


@route.callback()
@takes(options_of(RouterSettings))
def run(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options.")] = None,
    **_flags: Any,
) -> None:
    """Route requests to several replicas, each to the replica with the least estimated time.

    The estimate is in seconds: the queue, and the part of the prompt that the replica has to compute. Answers are
    streamed. docs/routing.md describes strategies, retries and failures.
    """
    if context.invoked_subcommand is not None:
        return
    with explained():
        from hotspan.router.run import run_router

        settings = _with_secrets(built(RouterSettings, context, config))
        _check_exposure(settings)
        for line in _without_effect(settings):
            typer.secho(f"hotspan: {line}", fg=typer.colors.YELLOW, err=True)
        run_router(settings)


@route.command("replicas")
@runs(ReplicasOptions)
def replicas(options: ReplicasOptions) -> None:
    """Show the replicas of a running router."""
    answer = options.admin.get(REPLICAS)
    from rich.table import Table

    table = Table("replica", "group", "takes requests", "health", "breaker", "drained", "in flight", "tokens/s")
    with reading(options.admin.address):
        for each in answer["replicas"]:
            marks = {name: "yes" if each[name] else "no" for name in ("can_take", "is_drained")}
            states = (marks["can_take"], each["health"], each["breaker"], marks["is_drained"])
            numbers = (str(each["in_flight"]), f"{each['tokens_per_s']:,.0f}")
            table.add_row(each["replica"], each["group"], *states, *numbers)
    if options.json:
        print_json(answer)
    else:
        stdout_console().print(table)


@route.command("drain")
@runs(ReplicaOptions)
def drain(options: ReplicaOptions, replica: ReplicaUrl) -> None:
    """Send a replica no more requests; those in flight go on."""
    _show_drained(options, options.admin.post(DRAIN, {"replica": replica}))


@route.command("resume")
@runs(ReplicaOptions)
def resume(options: ReplicaOptions, replica: ReplicaUrl) -> None:
    """Send a drained replica requests again."""
    _show_drained(options, options.admin.post(RESUME, {"replica": replica}))


def _show_drained(options: ReplicaOptions, shown: Any) -> None:
    with reading(options.admin.address):
        state = "drained" if shown["is_drained"] else "takes requests" if shown["can_take"] else f"is {shown['health']}"
        typer.echo(f"{shown['replica']}: {state}, {shown['in_flight']} requests in flight")


def _without_effect(settings: RouterSettings) -> Iterator[str]:
    """What somebody gave that has no effect beside the rest, and why."""
    defaults = {option.name: option.default for option in options_of(RouterSettings)}
    strategy = settings.strategy
    rules = (
        (
            ("threshold",),
            strategy not in (Strategy.PREFIXAWARE, Strategy.KVAWARE),
            f"--strategy {strategy} has no threshold",
        ),
        (("retry_share", "retry_reserve"), settings.attempts == 1, "--attempts 1 disables retries"),
        (("max_drift", "shadow_in_flight"), not settings.shadow, "no --shadow is given"),
    )
    for names, holds, why in rules:
        for name in names:
            if holds and getattr(settings, name) != defaults[name]:
                yield f"--{name.replace('_', '-')} has no effect: {why}"


def _with_secrets(settings: RouterSettings) -> RouterSettings:
    """The settings with what their files of secrets hold. Raises: ConfigError."""
    from hotspan.config.kv_events import read_key

    if settings.kv_events_key is not None and not any(replica.events for replica in settings.replicas):
        raise ConfigError("--kv-events-key is given, but no replica has events: add events=tcp://... to --replica")
    return replace(
        settings,
        keys=_keys(settings.api_keys_file, settings.tenants),
        admin_token=given_token(settings.admin_token_file, environment()),
        events_keys=None if settings.kv_events_key is None else read_key(settings.kv_events_key),
    )


def _check_exposure(settings: RouterSettings) -> None:
    if settings.keys or settings.insecure or is_loopback(settings.host):
        return
    raise ConfigError(
        f"--host {settings.host} lets other machines in, and nobody needs a key here: give clients keys with "
        "--api-keys-file or --tenants FILE, listen on 127.0.0.1, or say --insecure if the replicas check keys"
    )


def _keys(file: Path | None, tenants: Path | None) -> dict[bytes, str]:
    """The keys that are let in, and whose they are."""
    if file is not None and tenants is not None:
        raise ConfigError("both --api-keys-file and --tenants say whose keys are let in: give one of them")
    if tenants is not None:
        return {digest: tenant.name for tenant in load_tenants(tenants).tenants for digest in tenant.keys}
    return {} if file is None else dict.fromkeys(_digests(file), "")


def _digests(file: Path) -> set[bytes]:
    digests = set()
    for number, line in enumerate(read_private(file, "the API keys").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        try:
            digests.add(read_api_key(key))
        except ValueError as error:
            raise ConfigError(f"{file}:{number} holds a key {error}") from None
    if not digests:
        raise ConfigError(f"{file} has no API key: write one a line")
    return digests
