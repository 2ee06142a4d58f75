"""hotspan's options of `hotspan serve` and of what looks at the same configuration, made from the table of keys."""

import dataclasses
from functools import partial
from typing import Annotated

import typer

from hotspan.cli.options import flags_given
from hotspan.config.configuration import Configuration, load_configuration, visible_gpus
from hotspan.config.engine_options import check_options
from hotspan.config.environment import environment
from hotspan.config.inert import store_notes
from hotspan.config.keys import BY_NAME, FLAGS
from hotspan.config.origin import Source
from hotspan.config.own import CommandLine
from hotspan.config.wrong import each
from hotspan.core.errors import ConfigError

Model = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL", help=f"{BY_NAME['model'].help} Optional where configuration names it.", show_default=False
    ),
]
"""What `hotspan serve` and what looks at its configuration take before all options."""

OWN_OPTIONS = tuple(key.flag for key in FLAGS)
"""hotspan's own, for hints at what was meant."""

ENGINE_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
"""What a command needs that takes the engine's options after hotspan's."""


def given_on(context: typer.Context, model: str | None) -> CommandLine:
    """What of all that a command takes the command line gave."""
    flags = flags_given(context, FLAGS)
    words = list(context.args)
    if model is not None and model.startswith("-"):  # an option of the engine, where MODEL is named elsewhere
        words.insert(0, model)
        model = None
    return CommandLine(model, flags, words)


def load(context: typer.Context, model: str | None) -> Configuration:
    """The configuration of a command line and its surroundings, options of the engine unchecked.

    Raises: ConfigError that names key, value, origin and remedy.
    """
    surroundings = environment()
    return load_configuration(given_on(context, model), surroundings, gpus=visible_gpus(surroundings))


def load_checked(context: typer.Context, model: str | None) -> Configuration:
    """The configuration, its options of the engine checked if others than the command line gave some.

    Blocks: seconds, if so: vLLM is imported.
    Raises: as load.
    """
    configuration = load(context, model)
    return check_engine(configuration) if configuration.engine else configuration


def check_engine(configuration: Configuration) -> Configuration:
    """The configuration with options that the engine's parser takes. Raises: as load."""
    from hotspan.engine.arguments import parse_engine_arguments

    parse = partial(parse_engine_arguments, configuration.model, own_options=OWN_OPTIONS)
    try:
        defaults = vars(parse(()))
    except ConfigError as error:
        setting = configuration.settings["model"]
        with each():
            if setting.source is Source.COMMAND_LINE:
                raise
            raise ConfigError(f"{setting.given.origin}: {error}") from error
        return configuration
    checked = check_options(configuration.engine, configuration.words, defaults, parse)
    return dataclasses.replace(configuration, engine=checked)


def show_warnings(configuration: Configuration, *, is_store: bool = False) -> None:
    """Name on stderr every value that somebody wrote and that does not act, and what happens instead.

    is_store: a directory of several models is served, or one model of it.
    """
    for note in (*configuration.notes, *(() if is_store else store_notes(configuration.settings))):
        if note.is_warning:
            typer.secho(f"hotspan: {note}", fg=typer.colors.YELLOW, err=True)
