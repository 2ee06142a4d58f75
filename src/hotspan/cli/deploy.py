"""`hotspan deploy ray`: replicas on a Ray cluster."""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NoReturn

import typer
import yaml

from hotspan.cli.options import built, takes
from hotspan.cli.output import explained
from hotspan.config.environment import environment
from hotspan.config.options import option, options_of
from hotspan.core.errors import ConfigError
from hotspan.router.ray.plan import Launch, Plan, checked_words

_SESSION_KEY = "x-session-id"

deploy = typer.Typer(help="Run several replicas on a cluster.", no_args_is_help=True)


@deploy.callback()
def _deploy() -> None:
    """Run several replicas on a cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """What becomes of a plan."""

    autoscale: str = option(
        "", "Minimum and maximum number of replicas for Ray's autoscaler, as MIN:MAX. Default: no autoscaling."
    )
    dry_run: bool = option(False, "Print the Ray Serve config file and exit.")


@deploy.command("ray", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
@takes((*options_of(RayOptions), *options_of(Plan), *options_of(Launch)))
def on_ray(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="Model to serve: a directory on every node, or a hub ID.")],
    **_flags: Any,
) -> None:
    """Serve MODEL with several replicas on a Ray cluster. Options after -- are passed to `hotspan serve`."""
    with explained():
        _check_ray()
        words = tuple(_checked([model, *context.args]))
        options = built(RayOptions, context)
        least, most = _bounds(options.autoscale)
        plan = built(Plan, context, words=words, min_replicas=least, max_replicas=most)
        plan = replace(plan, session_key=plan.session_key or _SESSION_KEY)
        launch = built(Launch, context)
        if options.dry_run:
            _show(plan, launch)
            return
        _launch(plan, launch)


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise ConfigError("Ray Serve is not installed: pip install 'hotspan[ray]'")


def _checked(words: Sequence[str]) -> list[str]:
    """As `checked_words`. Raises: ConfigError for options of the replicas that Ray decides, too."""
    given = {word.partition("=")[0] for word in words}
    for flag in ("--host", "--port", "--shutdown-timeout"):
        if flag in given:
            raise ConfigError(f"{flag} of each replica is set by Ray: leave it out after --")
    return checked_words(words, environment())


def _bounds(text: str) -> tuple[int, int]:
    if not text:
        return 0, 0
    if re.fullmatch("[0-9]+:[1-9][0-9]*", text) is None:
        raise ConfigError(f"--autoscale {text}: give MIN:MAX, such as 1:8")
    least, most = text.split(":")
    return int(least), int(most)


def _show(plan: Plan, launch: Launch) -> None:
    from hotspan.router.ray.application import config

    typer.echo("# Before `ray start` on every node, and in a RayService's containers:")
    for variable, value in _variables(plan).items():
        typer.echo(f"#   export {variable}={value}")
    made = config(plan, name=launch.name, host=launch.host, port=launch.port)
    typer.echo(yaml.safe_dump(made, sort_keys=False).rstrip())


def _variables(plan: Plan) -> dict[str, str]:
    from hotspan.router.ray.launch import NEEDED, SESSION_HEADER

    return {**NEEDED, SESSION_HEADER: plan.session_key}


def _launch(plan: Plan, launch: Launch) -> NoReturn:
    """Go on as the process that deploys: Ray reads its environment when it is imported."""
    surroundings = {**_variables(plan), **environment()}
    given = {"plan": asdict(plan), **asdict(launch)}
    command = [sys.executable, "-m", "hotspan.router.ray.launch", json.dumps(given)]
    sys.stdout.flush()
    os.execve(sys.executable, command, surroundings)
