"""Values with where they were written, and which of them counts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from hotspan.core.errors import ConfigError
from hotspan.core.redaction import redacted

COMMAND_LINE = "command line"
ENVIRONMENT = "environment"


class Source(IntEnum):
    """Where values come from; what stands first here beats what stands below."""

    COMMAND_LINE = 0
    SAGEMAKER = 1
    """SAGEMAKER_* variables."""
    SERVING_PROPERTIES = 2
    OPTION = 3
    """OPTION_* variables."""
    SERVING = 4
    """SERVING_* variables."""
    ALIAS = 5
    """Variables with names of their own, such as HF_MODEL_ID."""
    CONFIG_PROPERTIES = 6
    HOTSPAN_VARIABLE = 7
    HOTSPAN_FILE = 8
    """--config FILE."""
    LMCACHE_CONNECTOR = 9
    """lmcache.* in the extra configuration of kv_transfer_config."""
    LMCACHE_VARIABLE = 10
    LMCACHE_FILE = 11
    IMPLIED = 12
    """What LMI or LMCache takes where nothing is said, once their configuration is in use."""
    DEFAULT = 13


@dataclass(frozen=True, slots=True)
class Entry:
    """One name of a file, its value, and where it stands: the file with its line."""

    name: str
    value: Any = field(repr=False)
    place: str


@dataclass(frozen=True, slots=True)
class Given:
    """One value as somebody wrote it.

    key:     which setting it is (keys.py).
    written: the name that it was written under.
    text:    the value as it was written, where hotspan made another of it.
    place:   a file with its line, "environment", or "command line".
    order:   of names that one source has for one setting: a lower one counts, equals that differ are an error.
    """

    key: str
    value: Any = field(repr=False)
    source: Source
    written: str
    place: str
    text: Any = field(default=None, repr=False)
    order: int = 0

    @property
    def is_off(self) -> bool:
        """Whether somebody wrote that there is to be none, whatever is written elsewhere."""
        return self.value is None and self.source is Source.COMMAND_LINE

    @property
    def where(self) -> str:
        """How errors name it."""
        return said(self.place, self.written)

    @property
    def origin(self) -> str:
        """Where it stands and what stands there: "/m/serving.properties:3: option.dtype = bf16"."""
        if self.source >= Source.IMPLIED:
            return self.place
        return self.where if self.text is None else f"{self.where} = {shown(self.written, self.text)}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What counts for one key, and what it overrode, the strongest first."""

    given: Given
    overridden: tuple[Given, ...] = ()

    @property
    def value(self) -> Any:
        return self.given.value

    @property
    def source(self) -> Source:
        return self.given.source


@dataclass(frozen=True, slots=True)
class Note:
    """What happens instead of what a value asks for.

    is_warning: that is not what was asked, or needs to be known, and is shown at the start.
    event:      what a log calls it.
    """

    where: str
    text: str
    is_warning: bool = False
    event: str = "option_without_effect"

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"


class Settings(dict[str, Setting]):
    """What counts, by the options' names."""

    def value(self, name: str, default: Any = None) -> Any:
        """A value; `default` if nobody named that option, and it has no default of its own."""
        return self[name].value if name in self else default

    def is_on(self, name: str) -> bool:
        """Whether an option is there and true."""
        return self.value(name) is True

    def is_given(self, name: str) -> bool:
        """Whether a value counts that is not hotspan's default."""
        return self[name].source is not Source.DEFAULT

    def count(self, name: str, default: int) -> int:
        """A whole number that the engine gets; what it would refuse counts as the default here."""
        text = str(self.value(name, ""))
        return int(text) if text.isdecimal() and int(text) > 0 else default

    @property
    def names_tiers(self) -> bool:
        """Whether anybody said what the tiers are."""
        return any(map(self.is_given, ("ram_gib", "disk", "l2", "no_cache")))


def resolve(givens: Iterable[Given]) -> Settings:
    """What counts for each key; one that is off is not there.

    Raises: ConfigError if one source says two different things of one key.
    """
    by_key: dict[str, list[Given]] = {}
    for given in givens:
        by_key.setdefault(given.key, []).append(given)
    settings = Settings()
    for key, found in by_key.items():
        found.sort(key=lambda given: (given.source, given.order))
        first = found[0]
        for other in found[1:]:
            if (other.source, other.order) == (first.source, first.order) and other.value != first.value:
                raise ConfigError(
                    f"{first.where} is {shown(key, first.value)} and "
                    f"{other.where} is {shown(key, other.value)}, and both are {key}: "
                    "leave one of them out"
                )
        if not first.is_off:
            settings[key] = Setting(first, tuple(found[1:]))
    return settings


def said(place: str, written: str) -> str:
    """How errors name a value: by its place and name."""
    return written if place == COMMAND_LINE else f"{place}: {written}"


def shown(name: str, value: Any) -> str:
    """A value for people to read; secrets are left out."""
    if value is None:
        return "none"
    value = redacted(value, name)
    return json.dumps(value, default=str) if isinstance(value, bool | Mapping | list) else str(value)
