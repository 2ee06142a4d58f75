"""`hotspan route`: one address for several replicas, each request to where it costs least."""

import dataclasses
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from hotspan.cli.errors import explained
from hotspan.core.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from hotspan.config.kinds import Kind
    from hotspan.router.settings import RouterSettings


def route(
    context: typer.Context,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            help="Replica: URL or GROUP=URL; append ,events=tcp://HOST:PORT for its KV events. May be repeated."
        ),
    ] = None,
    strategy: Annotated[
        str, typer.Option(help="Routing strategy: auto, prefixaware, kvaware, session or roundrobin.")
    ] = "auto",
    threshold: Annotated[
        int,
        typer.Option(help="prefixaware, kvaware: requests in flight at a replica above which another one is chosen."),
    ] = 16,
    config: Annotated[Path | None, typer.Option(help="YAML file with any of these options.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    model: Annotated[
        Path | None, typer.Option(help="Directory with the model's tokenizer and chat template: needed for KV events.")
    ] = None,
    model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests; other names are adapters. May be repeated.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="GROUP=10%: share of the sessions for that group. May be repeated.")
    ] = None,
    session_key: Annotated[
        str | None,
        typer.Option(help="Request header or body field with the session id; takes precedence over the built-in ones."),
    ] = None,
    tenant_header: Annotated[
        str | None,
        typer.Option(help="Request header with the tenant's name. Default: the API key identifies the tenant."),
    ] = None,
    max_in_flight: Annotated[
        int, typer.Option(help="Maximum number of requests in flight per replica; further requests are queued.")
    ] = 256,
    queue_size: Annotated[
        int, typer.Option(help="Maximum number of queued requests; further requests are refused with 429.")
    ] = 1024,
    queue_timeout_s: Annotated[
        float, typer.Option(help="Maximum time in the queue, in seconds; then a request is refused with 503.")
    ] = 30.0,
    retry_share: Annotated[float, typer.Option(help="Retry budget: retries per request, on average.")] = 0.1,
    retry_reserve: Annotated[
        int, typer.Option(help="Retry budget: additional retries at once, for the requests of a replica that fails.")
    ] = 256,
    attempts: Annotated[int, typer.Option(help="Maximum number of attempts per request; 1 disables retries.")] = 3,
    connect_timeout_s: Annotated[float, typer.Option(help="Connect timeout, in seconds.")] = 2.0,
    read_timeout_s: Annotated[
        float, typer.Option(help="Read timeout, in seconds without a byte from the replica.")
    ] = 300.0,
    health_path: Annotated[str, typer.Option(help="Health-check path; 200 means healthy.")] = "/ping",
    health_interval_s: Annotated[float, typer.Option(help="Seconds between health checks.")] = 2.0,
    index_mib: Annotated[int, typer.Option(help="Memory for the index of cached texts, in MiB.")] = 256,
    max_request_bytes: Annotated[int, typer.Option(help="Maximum size of a request body, in bytes.")] = 64 << 20,
    drain_s: Annotated[
        float, typer.Option(help="Time for requests in flight after a signal to stop, in seconds.")
    ] = 30.0,
    expose: Annotated[
        bool, typer.Option("--expose", help="Add response headers with the chosen replica and the expected cache hit.")
    ] = False,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            help="File (mode 0600) with one API key or sha256:HEX per line. With it, every client needs a key."
        ),
    ] = None,
    tenants: Annotated[
        Path | None,
        typer.Option(help="The --tenants file of the replicas. With it, every client needs one of its keys."),
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(
            help="File (mode 0600) with the admin token. Without one, only this machine can reach /router/..."
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            help="Allow a --host other than 127.0.0.1 without API keys here, as where replicas check them.",
        ),
    ] = False,
    kv_events_key: Annotated[
        Path | None, typer.Option(help="File (0600) with the key of the replicas' KV events: no others are believed.")
    ] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="OTLP endpoint for OpenTelemetry spans, such as http://localhost:4318.")
    ] = None,
) -> None:
    """Route requests to several replicas, each to the replica with the least estimated time.

    The estimate is in seconds: the queue, and the part of the prompt that the replica has to compute. Answers are
    streamed. docs/routing.md describes strategies, retries and failures.
    """
    with explained():
        from hotspan.router.run import run_router

        values = given(context, config)
        settings = route_settings(values)
        for line in without_effect(values):
            typer.secho(f"hotspan: {line}", fg=typer.colors.YELLOW, err=True)
        run_router(settings)


def given(context: typer.Context, config: Path | None) -> dict[str, Any]:
    """What command line and file say: defaults, then the file, then what was typed. Raises: ConfigError."""
    values = {name: value for name, value in context.params.items() if name != "config"}
    if config is None:
        return values
    for name, value in read_file(config, option_kinds()).items():
        source = context.get_parameter_source(name)
        if source is None or source.name != "COMMANDLINE":
            values[name] = value
    return values


def without_effect(values: Mapping[str, Any]) -> list[str]:
    """What somebody gave that has no effect beside the rest, and why."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(route).parameters.items()}
    strategy = str(values["strategy"]).lower()
    rules = (
        (("threshold",), strategy not in ("prefixaware", "kvaware"), f"--strategy {strategy} has no threshold"),
        (("retry_share", "retry_reserve"), values["attempts"] == 1, "--attempts 1 disables retries"),
    )
    return [
        f"--{name.replace('_', '-')} has no effect: {why}"
        for names, holds, why in rules
        for name in names
        if holds and values[name] != defaults[name]
    ]


def read_file(path: Path, kinds: Mapping[str, "Kind"]) -> dict[str, Any]:
    """The settings of a YAML file, by the names of options. Raises: ConfigError that says where and what to write."""
    from hotspan.config.documents import parse_entries, read_text

    found = {}
    for entry in parse_entries(read_text(path), path):
        name = entry.name.replace("-", "_")
        if name not in kinds:
            hint = did_you_mean(name, kinds, "`hotspan route --help` lists what there is")
            raise ConfigError(f"{entry.place}: there is no {entry.name!r}: {hint}")
        if entry.value is not None:
            found[name] = kinds[name].parse(entry.value, f"{entry.place} {entry.name}")
    return found


def option_kinds() -> Mapping[str, "Kind"]:
    """What each option of the command takes, as a value in a file."""
    from hotspan.config import kinds

    texts = kinds.Kind("list", _texts, "a text, or a list of texts")
    by_type = {int: kinds.INTEGER, float: kinds.NUMBER, bool: kinds.BOOLEAN, list[str] | None: texts}
    found = {}
    for name, parameter in inspect.signature(route).parameters.items():
        taken = get_args(parameter.annotation)
        if taken and name != "config":
            found[name] = by_type.get(taken[0], kinds.TEXT)
    return found


def _texts(raw: Any) -> list[str]:
    texts = [raw] if isinstance(raw, str) else raw
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError
    return texts


def route_settings(values: Mapping[str, Any]) -> "RouterSettings":
    """What a router is started with. Raises: ConfigError."""
    from hotspan.core.types import MIB
    from hotspan.router.health import HealthSettings
    from hotspan.router.settings import RouterSettings, parse_replica, parse_shares

    same = {field.name for field in dataclasses.fields(RouterSettings)}
    options = {name: value for name, value in values.items() if name in same}
    options |= {name: Path(values[name]) for name in ("model",) if values.get(name)}
    options["strategy"] = _strategy(values["strategy"])
    if not values["health_path"].startswith("/"):
        raise ConfigError(f"--health-path {values['health_path']}: give a path, such as /ping or /health")
    interval_s = values["health_interval_s"]
    if interval_s <= 0:
        raise ConfigError(f"--health-interval-s is {interval_s}: give seconds above 0")
    settings = RouterSettings(
        **options,
        replicas=tuple(parse_replica(text) for text in values["replica"] or ()),
        shares=parse_shares(values["split"] or ()),
        health=HealthSettings(path=values["health_path"], interval_s=interval_s, timeout_s=max(interval_s, 1.0)),
        model_names=tuple(values["model_name"] or ()),
        index_bytes=values["index_mib"] * MIB,
        is_exposing=values["expose"],
        keys=_keys(values["api_keys_file"], values["tenants"]),
        admin_token=_admin_token(values["admin_token_file"]),
        events_keys=_events_keys(values["kv_events_key"]),
    )
    if settings.events_keys is not None and not any(replica.events for replica in settings.replicas):
        raise ConfigError("--kv-events-key is given, but no replica has events: add events=tcp://... to --replica")
    _check_exposure(settings, is_insecure=values["insecure"])
    return settings


def _strategy(name: str) -> Any:
    from hotspan.router.types import Strategy

    known = [strategy.value for strategy in Strategy]
    if name.lower() in known:
        return Strategy(name.lower())
    hint = did_you_mean(name.lower(), known, f"there are {', '.join(known)}")
    raise ConfigError(f"--strategy {name}: {hint}")


def _check_exposure(settings: "RouterSettings", *, is_insecure: bool) -> None:
    from hotspan.server.options import is_loopback

    if settings.keys or is_insecure or is_loopback(settings.host):
        return
    raise ConfigError(
        f"--host {settings.host} lets other machines in, and nobody needs a key here: give clients keys with "
        "--api-keys-file or --tenants FILE, listen on 127.0.0.1, or say --insecure if the replicas check keys"
    )


def _keys(file: Any, tenants: Any) -> dict[bytes, str]:
    """The keys that are let in, and whose they are."""
    from hotspan.config.tenants import load_tenants

    if file is not None and tenants is not None:
        raise ConfigError("both --api-keys-file and --tenants say whose keys are let in: give one of them")
    if tenants is not None:
        return {digest: tenant.name for tenant in load_tenants(Path(tenants)).tenants for digest in tenant.keys}
    return {} if file is None else dict.fromkeys(_digests(Path(file)), "")


def _digests(file: Path) -> set[bytes]:
    from hotspan.config.secrets import is_token, read_private
    from hotspan.core.credentials import key_digest

    digests = set()
    for number, line in enumerate(read_private(file, "the API keys").splitlines(), 1):
        key = line.strip()
        if not key or key.startswith("#"):
            continue
        if not is_token(key):
            raise ConfigError(f"{file}:{number} is no key that a header can carry: give visible ASCII without spaces")
        hexes = key.removeprefix("sha256:")
        if hexes == key:
            digests.add(key_digest(key))
        elif len(hexes) == 64 and not set(hexes.lower()) - set("0123456789abcdef"):
            digests.add(bytes.fromhex(hexes))
        else:
            raise ConfigError(f"{file}:{number} is no SHA-256: write sha256: and 64 hex digits")
    if not digests:
        raise ConfigError(f"{file} has no API key: write one a line")
    return digests


def _events_keys(file: Any) -> Any:
    from hotspan.config.kv_events import read_key

    return None if file is None else read_key(Path(file).expanduser())


def _admin_token(file: Any) -> str | None:
    from hotspan.config.admin_token import given_token
    from hotspan.config.environment import environment

    return given_token(None if file is None else Path(file), environment())
