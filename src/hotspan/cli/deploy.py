"""`hotspan deploy ray`: replicas on a Ray cluster."""

import importlib.util
import json
import os
import sys
from typing import Annotated, Any, NoReturn

import typer

from hotspan.cli.errors import explained

deploy = typer.Typer(help="Run several replicas on a cluster.", no_args_is_help=True)


@deploy.callback()
def _deploy() -> None:
    """Run several replicas on a cluster."""


@deploy.command("ray", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def on_ray(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model to serve: a directory on every node, or a hub ID.")],
    replicas: Annotated[int, typer.Option(help="Number of replicas at the start.")] = 2,
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="MIN:MAX",
            help="Minimum and maximum number of replicas for Ray's autoscaler. Default: no autoscaling.",
        ),
    ] = None,
    target_queue_seconds: Annotated[
        float, typer.Option(help="With --autoscale: target queue length per replica, in seconds of work.")
    ] = 2.0,
    gpus: Annotated[float, typer.Option(help="GPUs per replica. 0: CPU only.")] = 1,
    cpus: Annotated[float, typer.Option(help="CPUs per replica, in Ray's units.")] = 4,
    strategy: Annotated[
        str, typer.Option(help="Routing strategy: auto, session, prefixaware, kvaware or roundrobin.")
    ] = "auto",
    session_key: Annotated[str, typer.Option(help="Request header with the session ID.")] = "x-session-id",
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Directory with the tokenizer and chat template, on every node. Default: compare prompts as text."
        ),
    ] = None,
    max_in_flight: Annotated[int, typer.Option(help="Maximum number of concurrent requests per replica.")] = 1000,
    host: Annotated[str, typer.Option(help="Address of HAProxy. Ray listens on all addresses.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="Port of HAProxy.")] = 8000,
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster. Default: start Ray on this machine.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the Ray Serve application.")] = "hotspan",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the Ray Serve config file and exit.")] = False,
) -> None:
    """Serve MODEL with several replicas on a Ray cluster. Options after -- are passed to `hotspan serve`."""
    with explained():
        _check_ray()
        words = [model, *context.args]
        _check_words(words)
        least, most = _bounds(autoscale)
        plan = {
            "words": words,
            "model": tokenizer,
            "replicas": replicas,
            "least": least,
            "most": most,
            "target_queue_s": target_queue_seconds,
            "gpus": gpus,
            "cpus": cpus,
            "strategy": strategy,
            "session_key": session_key,
            "max_in_flight": max_in_flight,
        }
        given = {"plan": plan, "name": name, "host": host, "port": port, "address": address}
        if dry_run:
            _show(given)
            return
        _launch(given, session_key)


def _check_ray() -> None:
    from hotspan.core.errors import ConfigError

    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise ConfigError("Ray Serve is not installed: pip install 'hotspan[ray]'")


def _check_words(words: list[str]) -> None:
    """Raise ConfigError for options of the replicas that Ray decides, and for a service that nobody needs a key for."""
    from hotspan.config.environment import environment
    from hotspan.core.errors import ConfigError
    from hotspan.router.ray.exposure import check_exposure

    check_exposure(words, environment())
    given = {word.partition("=")[0] for word in words}
    for option in ("--host", "--port", "--shutdown-timeout"):
        if option in given:
            raise ConfigError(f"{option} of each replica is set by Ray: leave it out after --")


def _bounds(text: str | None) -> tuple[int, int]:
    from hotspan.core.errors import ConfigError

    if text is None:
        return 0, 0
    least, colon, most = text.partition(":")
    if not (colon and least.isdecimal() and most.isdecimal()):
        raise ConfigError(f"--autoscale {text}: give MIN:MAX, such as 1:8")
    if not 1 <= int(least) <= int(most):
        raise ConfigError(f"--autoscale {text} can't be: give MIN:MAX with 1 <= MIN <= MAX")
    return int(least), int(most)


def _show(given: dict[str, Any]) -> None:
    import yaml

    from hotspan.router.ray.application import Plan, config

    made = config(Plan(**given["plan"]), name=given["name"], host=given["host"], port=given["port"])
    typer.echo("# Before `ray start` on every node, and in a RayService's containers:")
    for variable, value in _variables(given["plan"]["session_key"]).items():
        typer.echo(f"#   export {variable}={value}")
    typer.echo(yaml.safe_dump(made, sort_keys=False).rstrip())


def _variables(session_key: str) -> dict[str, str]:
    from hotspan.router.ray.launch import NEEDED, SESSION_HEADER

    return {**NEEDED, SESSION_HEADER: session_key}


def _launch(given: dict[str, Any], session_key: str) -> NoReturn:
    """Go on as the process that deploys: Ray reads its environment when it is imported."""
    from hotspan.config.environment import environment

    surroundings = {**_variables(session_key), **environment()}
    command = [sys.executable, "-m", "hotspan.router.ray.launch", json.dumps(given)]
    sys.stdout.flush()
    os.execve(sys.executable, command, surroundings)
