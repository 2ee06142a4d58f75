"""hotspan's own configuration: the command line, HOTSPAN_* and the YAML of --config."""

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hotspan.config.admin_token import VARIABLE as ADMIN_TOKEN
from hotspan.config.documents import read_options
from hotspan.config.engine_options import split_words
from hotspan.config.environment import is_service_link
from hotspan.config.keys import BY_NAME, CONFIG_FILE, FLAGS, KEYS, meant, unlisted
from hotspan.config.kinds import PATH, TEXT
from hotspan.config.options import Option
from hotspan.config.origin import COMMAND_LINE, ENVIRONMENT, Entry, Given, Source, said
from hotspan.config.wrong import each
from hotspan.core.errors import ConfigError

_VARIABLE = "HOTSPAN_"
_OWN = {key.name: key for key in (*KEYS, CONFIG_FILE) if key.is_own}


@dataclass(frozen=True, slots=True)
class CommandLine:
    """What stood behind `hotspan serve`.

    flags: hotspan's own, by the names of their keys; what was not given is not in it, and None is what is off.
    words: the engine's options, as they stood.
    """

    model: str | None = None
    flags: Mapping[str, Any] = field(default_factory=dict, repr=False)
    words: Sequence[str] = field(default=(), repr=False)


def with_negations(command_line: CommandLine) -> CommandLine:
    """The command line with `--no-X` of hotspan's own options among its flags: None for an option that is off.

    Raises: ConfigError for an option that can't be off, is given as well, or has a value.
    """
    own, flags, words = {option.name: option for option in FLAGS}, dict(command_line.flags), list[str]()
    for group in split_words(command_line.words):
        word, equals, _ = group.words[0].partition("=")
        option = own.get(group.name or "")
        if option is None or not word.startswith("--no-"):
            words += group.words
            continue
        if equals or group.words[1:]:
            raise ConfigError(f"{word} takes no value: leave it out; MODEL stands before all options")
        if option.name in command_line.flags:
            raise ConfigError(f"{option.flag} and {word} are both given: leave one of them out")
        flags[option.name] = _off(option, word)
    return replace(command_line, flags=flags, words=tuple(words))


def _off(option: Option, word: str) -> Any:
    """What an option is when it is off. Raises: ConfigError if it always has a value."""
    if option.default is None:
        return None
    if option.kind not in (TEXT, PATH) and not option.kind.is_repeated:
        for off in ("off", "never", "none"):
            with contextlib.suppress(ConfigError):
                option.kind.parse(off, word)
                return off
    raise ConfigError(f"{word}: {option.flag} can't be off: give {option.kind.wants}, or leave it out")


def read_flags(flags: Mapping[str, Any], options: Iterable[Option]) -> list[Given]:
    """What flags give, by the options' names. Raises: ConfigError for a value of the wrong type."""
    givens = []
    for option in options:
        if option.name in flags and flags[option.name] is None:
            givens.append(Given(option.name, None, Source.COMMAND_LINE, option.flag, COMMAND_LINE))
        elif option.name in flags:
            with each():
                givens.append(option.given(flags[option.name], Source.COMMAND_LINE, option.flag, COMMAND_LINE))
    return givens


def read_command_line(command_line: CommandLine) -> list[Given]:
    """What the command line gives. Raises: ConfigError for a value of the wrong type."""
    givens = []
    if command_line.model is not None:
        givens.append(Given("model", command_line.model, Source.COMMAND_LINE, "MODEL", COMMAND_LINE))
    givens += read_flags(command_line.flags, FLAGS)
    # Of an option that is given twice, vLLM takes the last.
    engine = {option.name: option for option in split_words(command_line.words) if option.name}
    for name, option in engine.items():
        givens.append(Given(name, option.value, Source.COMMAND_LINE, option.words[0].partition("=")[0], COMMAND_LINE))
    return givens


def read_variables(surroundings: Mapping[str, str]) -> list[Given]:
    """What HOTSPAN_* give. Raises: ConfigError for an unknown name or a value of the wrong type."""
    givens = []
    for variable, raw in sorted(surroundings.items()):
        if not variable.startswith(_VARIABLE) or variable == ADMIN_TOKEN:
            continue
        if not raw.strip() or is_service_link(variable, raw):
            continue
        with each():
            key = _OWN.get(variable.removeprefix(_VARIABLE).lower())
            if key is None:
                hint = meant(variable, [_VARIABLE + name.upper() for name in _OWN])
                raise ConfigError(f"{said(ENVIRONMENT, variable)}: there is no such variable: {hint}")
            givens.append(key.given(raw, Source.HOTSPAN_VARIABLE, variable, ENVIRONMENT, text=raw.strip()))
    return givens


def read_file(path: Path) -> list[Given]:
    """What the YAML of --config gives: hotspan's flags and vLLM's options, without their dashes.

    Raises: ConfigError for what is no YAML, or a value of the wrong type. A name that is nobody's counts as vLLM's.
    """

    def find(entry: Entry) -> Option:
        plain = entry.name.replace("-", "_")
        if plain == CONFIG_FILE.name:
            where = said(entry.place, entry.name)
            raise ConfigError(f"{where}: one file is read, and names no other: write everything in {path}")
        return BY_NAME.get(plain) or unlisted(plain)

    return read_options(path, find)
