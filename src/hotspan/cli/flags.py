"""hotspan's options of `hotspan serve` and of what looks at the same configuration, made from the table of keys."""

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hotspan.config.keys import BY_NAME, FLAGS, Key
from hotspan.config.kinds import BOOLEAN, PAIRS
from hotspan.config.origin import Source
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.config.configuration import Configuration
    from hotspan.config.own import CommandLine

OWN_OPTIONS = tuple(key.flag for key in FLAGS)
"""hotspan's own, for hints at what was meant."""

ENGINE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What a command needs that takes the engine's options after hotspan's."""


def takes_configuration(command: Callable[..., None]) -> Callable[..., None]:
    """The command, taking MODEL and every option of hotspan's; what else it takes stays."""
    given = inspect.signature(command)
    own = [parameter for parameter in given.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    flags = [_parameter(key) for key in FLAGS]
    taken = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own[2:]]
    command.__signature__ = inspect.Signature([*own[:1], _model(), *taken, *flags])  # type: ignore[attr-defined]
    return command


def given_on(context: typer.Context, model: str | None) -> "CommandLine":
    """What of all that a command takes the command line gave."""
    from hotspan.config.own import CommandLine

    flags = {key.name: context.params[key.name] for key in FLAGS if _is_given(context, key.name)}
    words = list(context.args)
    if model is not None and model.startswith("-"):  # an option of the engine, where MODEL is named elsewhere
        words.insert(0, model)
        model = None
    return CommandLine(model, flags, words)


def load(context: typer.Context, model: str | None) -> "Configuration":
    """The configuration of a command line and its surroundings, options of the engine unchecked.

    Raises: ConfigError that names key, value, origin and remedy.
    """
    from hotspan.config.configuration import load_configuration, visible_gpus
    from hotspan.config.environment import environment

    surroundings = environment()
    return load_configuration(given_on(context, model), surroundings, gpus=visible_gpus(surroundings))


def load_checked(context: typer.Context, model: str | None) -> "Configuration":
    """The configuration, its options of the engine checked if others than the command line gave some.

    Blocks: seconds, if so: vLLM is imported.
    Raises: as load.
    """
    configuration = load(context, model)
    return check_engine(configuration) if configuration.engine else configuration


def check_engine(configuration: "Configuration") -> "Configuration":
    """The configuration with options that the engine's parser takes. Raises: as load."""
    from hotspan.config.engine_options import check_options
    from hotspan.engine.arguments import parse_engine_arguments

    parse = partial(parse_engine_arguments, configuration.model, own_options=OWN_OPTIONS)
    try:
        defaults = vars(parse(()))
    except ConfigError as error:
        setting = configuration.settings["model"]
        if setting.source is Source.COMMAND_LINE:
            raise
        raise ConfigError(f"{setting.given.origin}: {error}") from error
    checked = check_options(configuration.engine, configuration.words, defaults, parse)
    return dataclasses.replace(configuration, engine=checked)


def show_warnings(configuration: "Configuration", *, is_store: bool = False) -> None:
    """Name on stderr every value that somebody wrote and that does not act, and what happens instead.

    is_store: a directory of several models is served, or one model of it.
    """
    from hotspan.config.inert import store_notes

    for note in (*configuration.notes, *(() if is_store else store_notes(configuration.settings))):
        if note.is_warning:
            typer.secho(f"hotspan: {note}", fg=typer.colors.YELLOW, err=True)


def _model() -> inspect.Parameter:
    help = f"{BY_NAME['model'].meaning} Optional where configuration names it."
    return inspect.Parameter(
        "model",
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        default=None,
        annotation=Annotated[str | None, typer.Argument(metavar="MODEL", help=help)],
    )


def _parameter(key: Key) -> inspect.Parameter:
    kind: Any = str | None
    metavar: str | None = key.kind.name
    if key.kind is BOOLEAN:
        kind, metavar = bool, None
    elif key.kind is PAIRS:
        kind = list[str] | None
    default = key.default if key.default is None or key.kind is BOOLEAN else str(key.default)
    option = typer.Option(key.flag, help=key.meaning, metavar=metavar, show_default=key.chosen or True)
    return inspect.Parameter(
        key.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
