"""`hotspan route`: one address for several replicas, each request to where it costs least."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from hotspan.cli.options import built, takes
from hotspan.cli.output import explained
from hotspan.config.options import options_of
from hotspan.core.errors import ConfigError
from hotspan.router.settings import RouterSettings
from hotspan.router.types import Strategy


@takes(options_of(RouterSettings))
def route(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options.")] = None,
    **_flags: Any,
) -> None:
    """Route requests to several replicas, each to the replica with the least estimated time.

    The estimate is in seconds: the queue, and the part of the prompt that the replica has to compute. Answers are
    streamed. docs/routing.md describes strategies, retries and failures.
    """
    with explained():
        from hotspan.router.run import run_router

        settings = _with_secrets(built(RouterSettings, context, config))
        _check_exposure(settings)
        for line in _without_effect(settings):
            typer.secho(f"hotspan: {line}", fg=typer.colors.YELLOW, err=True)
        run_router(settings)


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
    from hotspan.config.admin_token import given_token
    from hotspan.config.environment import environment
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
    from hotspan.core.addresses import is_loopback

    if settings.keys or settings.insecure or is_loopback(settings.host):
        return
    raise ConfigError(
        f"--host {settings.host} lets other machines in, and nobody needs a key here: give clients keys with "
        "--api-keys-file or --tenants FILE, listen on 127.0.0.1, or say --insecure if the replicas check keys"
    )


def _keys(file: Path | None, tenants: Path | None) -> dict[bytes, str]:
    """The keys that are let in, and whose they are."""
    from hotspan.config.tenants import load_tenants

    if file is not None and tenants is not None:
        raise ConfigError("both --api-keys-file and --tenants say whose keys are let in: give one of them")
    if tenants is not None:
        return {digest: tenant.name for tenant in load_tenants(tenants).tenants for digest in tenant.keys}
    return {} if file is None else dict.fromkeys(_digests(file), "")


def _digests(file: Path) -> set[bytes]:
    from hotspan.config.secrets import read_private
    from hotspan.config.tenants import read_api_key

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
