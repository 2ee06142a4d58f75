"""Options of the engine: as words of a command line, and checked against what the engine's parser knows.

The parser itself is the engine's; who calls this hands in what it says.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hotspan.config.keys import KEYS, meant
from hotspan.config.lmi import lmi_names, spellings
from hotspan.config.origin import Given, Source
from hotspan.config.wrong import each, is_collecting, one_by_one
from hotspan.core.errors import ConfigError

_SHORT = {
    "tp": "tensor_parallel_size",
    "pp": "pipeline_parallel_size",
    "dp": "data_parallel_size",
    "q": "quantization",
    "sc": "speculative_config",
}

Parse = Callable[[Sequence[str]], object]
"""What the engine's parser makes of words; it raises ConfigError."""


@dataclass(frozen=True, slots=True)
class Words:
    """An option of the command line as it stood; `name` is None for words before the first option."""

    name: str | None
    words: tuple[str, ...] = field(repr=False)

    @property
    def value(self) -> Any:
        """Its value as far as words tell: a truth without any, a list of several."""
        head, equals, tail = self.words[0].partition("=")
        values = ([tail] if equals else []) + list(self.words[1:])
        if not values:
            return not head.startswith("--no-")
        return values[0] if len(values) == 1 else values


def words_of(option: Given) -> tuple[str, ...]:
    """An option that the command line did not give, as the engine's parser takes it."""
    flag, value = "--" + option.key.replace("_", "-"), option.value
    if isinstance(value, bool):
        return (flag if value else "--no-" + flag.removeprefix("--"),)
    values = [_word(one) for one in value] if isinstance(value, list) else [_word(value)]
    if len(values) == 1 and values[0].startswith("-"):
        return (f"{flag}={values[0]}",)
    return (flag, *values)


def split_words(words: Sequence[str]) -> list[Words]:
    """The options of a command line, in its order, with vLLM's names for them."""
    groups: list[list[str]] = []
    for word in words:
        if _is_option(word) or not groups:
            groups.append([word])
        else:
            groups[-1].append(word)
    return [Words(_name(group[0]), tuple(group)) for group in groups]


def check_options(
    options: Sequence[Given], last: Sequence[str], defaults: Mapping[str, Any], parse: Parse
) -> tuple[Given, ...]:
    """The options that the engine is to get, before the words `last` of the command line.

    defaults: what the engine's parser has for each name that it knows.
    Raises:   ConfigError that names key, value, origin and remedy.
    """
    for option in options:
        if option.key not in defaults:
            with each():
                raise ConfigError(_unknown(option, defaults))
    options = [option for option in options if option.key in defaults]
    # "false" for what only can be switched on is no option at all.
    wanted = tuple(option for option in options if not (option.value is False is defaults[option.key]))
    if is_collecting():
        wanted = tuple(option for option in wanted if _is_noted_right(option, parse))
    try:
        parse([*(word for option in wanted for word in words_of(option)), *last])
    except ConfigError as error:
        parse(last)  # what the command line alone has wrong needs no origin
        if (culprit := _culprit(wanted, last, parse)) is not None:
            raise ConfigError(f"{culprit.origin}: {error}") from error
        origins = "; ".join(option.origin for option in wanted)
        raise ConfigError(f"{error}. Besides the command line, options come from: {origins}") from error
    return wanted


def _is_noted_right(option: Given, parse: Parse) -> bool:
    """Whether an option is right alone; if not, that is kept with its origin."""
    try:
        with one_by_one():
            parse(words_of(option))
    except ConfigError as error:
        with each():
            raise ConfigError(f"{option.origin}: {error}") from error
        return False
    return True


def _culprit(options: Sequence[Given], last: Sequence[str], parse: Parse) -> Given | None:
    """The option that is wrong alone, and without which all is right: some only need another beside them."""
    alone = [option for option in options if not _is_right(words_of(option), parse)]
    for option in alone:
        others = [word for other in options if other is not option for word in words_of(other)]
        if _is_right([*others, *last], parse):
            return option
    return alone[0] if len(alone) == 1 else None


def _is_right(words: Sequence[str], parse: Parse) -> bool:
    try:
        parse(words)
    except ConfigError:
        return False
    return True


def _unknown(given: Given, defaults: Mapping[str, Any]) -> str:
    if given.source is Source.HOTSPAN_FILE:
        names = [key.name.replace("_", "-") for key in KEYS] + [name.replace("_", "-") for name in defaults]
        written = given.written.replace("_", "-")
    else:
        prefix = "OPTION_" if given.source is Source.OPTION else ""
        names = [name.replace("option.", prefix, 1).upper() if prefix else name for name in lmi_names()]
        names += [name for key in defaults for name in spellings(key, given.source)]
        written = given.written
    return f"{given.origin}: neither hotspan nor vLLM has such a key: {meant(written, names)}"


def _is_option(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not word[1].isdigit() and not word.startswith(("-.", "- "))


def _name(word: str) -> str | None:
    if not _is_option(word):
        return None
    name = word.partition("=")[0]
    if not name.startswith("--"):
        return _SHORT.get(name[1:], name[1:])
    # --compilation-config.level is part of --compilation-config.
    return name.removeprefix("--").partition(".")[0].replace("-", "_").removeprefix("no_")


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, Mapping | list | bool) else str(value)
