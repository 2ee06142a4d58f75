"""Flags of commands, made from the declarations of their options (config/options.py)."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from hotspan.cli.output import explained
from hotspan.config.documents import read_options
from hotspan.config.kinds import BOOLEAN, TEXT
from hotspan.config.options import Option, build, options_of
from hotspan.config.origin import Entry, Given, resolve
from hotspan.config.own import read_flags
from hotspan.core.errors import ConfigError, did_you_mean

T = TypeVar("T")


def takes(options: Iterable[Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command has these flags in the place of its `**flags`."""

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(command).parameters.values()
        own = [parameter for parameter in given if parameter.kind is not parameter.VAR_KEYWORD]
        kept = [parameter.replace(kind=parameter.KEYWORD_ONLY) for parameter in own]
        command.__signature__ = inspect.Signature([*kept, *map(_parameter, options)])  # type: ignore[attr-defined]
        return command

    return decorated


def runs(settings: type[T]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator: the command is given these settings, of its flags, first; its errors are a line and exit status 2.

    Its other parameters are those of typer.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        _settings, *own = inspect.signature(command).parameters.values()
        others = [each.replace(kind=each.KEYWORD_ONLY) for each in own if each.name != "context"]

        @functools.wraps(command)
        def run(context: typer.Context, **given: Any) -> None:
            given["context"] = context
            with explained():
                command(built(settings, context), **{each.name: given[each.name] for each in own})

        context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        flags = map(_parameter, options_of(settings))
        run.__signature__ = inspect.Signature([context, *others, *flags])  # type: ignore[attr-defined]
        return run

    return decorated


def flags_given(context: typer.Context, options: Iterable[Option]) -> dict[str, Any]:
    """What stood on the command line, by the options' names and as it was written."""
    return {option.name: context.params[option.name] for option in options if _is_given(context, option.name)}


def givens_of(context: typer.Context, options: Sequence[Option]) -> list[Given]:
    """The values on the command line. An empty text for an option without a default is no value.

    Raises: ConfigError for a value of the wrong type.
    """
    optional = {option.name for option in options if option.kind is TEXT and not option.default}
    flags = flags_given(context, options).items()
    return read_flags({name: value for name, value in flags if value != "" or name not in optional}, options)


def built(settings: type[T], context: typer.Context, file: Path | None = None, **more: Any) -> T:
    """The dataclass of options with what stood on the command line, else in a YAML file, else the defaults.

    more:   other fields.
    Raises: ConfigError that names option, value and remedy.
    """
    options = options_of(settings)
    by_name = {option.name: option for option in options}

    def find(entry: Entry) -> Option:
        name = entry.name.replace("-", "_")
        if name not in by_name:
            hint = did_you_mean(name, by_name, f"`{context.command_path} --help` lists what there is")
            raise ConfigError(f"{entry.place}: there is no {entry.name!r}: {hint}")
        return by_name[name]

    givens = givens_of(context, options)
    if file is not None:
        givens += read_options(file, find)
    return build(settings, {name: setting.value for name, setting in resolve(givens).items()}, **more)


def _parameter(option: Option) -> inspect.Parameter:
    kind: Any = bool if option.kind is BOOLEAN else list[str] | None if option.kind.is_repeated else str | None
    default: Any = option.default
    if default is MISSING:
        default = inspect.Parameter.empty
    elif option.kind.is_repeated:
        default = None
    elif default is not None and option.kind is not BOOLEAN:
        default = option.kind.write(default)
    metavar = None if option.kind is BOOLEAN else option.kind.name
    is_opposite = kind is bool and option.also.startswith("--")
    flags = (f"{option.flag}/{option.also}",) if is_opposite else (option.flag, option.also)
    info = typer.Option(
        *filter(None, flags),
        help=option.help,
        metavar=metavar,
        show_default=option.shown or (default != "" and "Default:" not in option.help),
        rich_help_panel=option.panel,
    )
    return inspect.Parameter(
        option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
