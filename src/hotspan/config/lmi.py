"""LMI's configuration: serving.properties, config.properties, OPTION_*, SERVING_*, SAGEMAKER_* and other variables."""

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from hotspan.config.environment import is_service_link
from hotspan.config.keys import BY_NAME, CONFIG_FILE, KEYS, meant, unlisted
from hotspan.config.lmi_accepted import ACCEPTED, SAGEMAKER_ACCEPTED
from hotspan.config.options import Option, Spelling
from hotspan.config.origin import ENVIRONMENT, Given, Note, Source, said, shown
from hotspan.config.properties import read_properties
from hotspan.config.wrong import each
from hotspan.core.errors import ConfigError, did_you_mean

_UPPER = re.compile(r"[A-Z_\d]+")
_OPTION = "option."
_WATCHED = ("SAGEMAKER_", "HF_MODEL_")
_NEAR = 0.9


def _spelled(key: Option) -> list[tuple[str, tuple[Option, Spelling]]]:
    return [(spelling.name.lower(), (key, spelling)) for spelling in key.spellings]


_NAMES = dict(pair for key in KEYS for pair in _spelled(key))
_VARIABLES = {spelling.name: (key, spelling) for key in KEYS for spelling in key.variables}
_ACCEPTED = {name.lower(): name for name in ACCEPTED}
_ADDRESS = "inference_address"

SECURE_ONLY = ("SAGEMAKER_SECURITY_CONTROLS", "SAGEMAKER_UNTRUSTED_CHANNELS")
"""Variables that act in secure mode."""


class LmiReader:
    """What LMI's files and variables say. `givens` and `notes` grow with each read."""

    def __init__(self) -> None:
        self.givens: list[Given] = []
        self.notes: list[Note] = []
        self.is_used = False

    def read_file(self, path: Path, source: Source) -> None:
        """Take a properties file. Raises: ConfigError that names key, value, place and remedy."""
        self.is_used = True
        for entry in read_properties(path):
            self._take(entry.name, entry.value, source, entry.name, entry.place)

    def read_variables(self, surroundings: Mapping[str, str]) -> None:
        """Take OPTION_*, SERVING_*, SAGEMAKER_* and those with names of their own. Raises: as read_file."""
        for name, raw in sorted(surroundings.items()):
            if not raw.strip() or is_service_link(name, raw):
                continue
            if name in _VARIABLES:
                self._take_variable(name, raw)
            elif name.startswith("OPTION_"):
                self.is_used = True
                self._take(_option(name.removeprefix("OPTION_")), raw, Source.OPTION, name, ENVIRONMENT)
            elif name.startswith("SERVING_"):
                self.is_used = True
                self._take(_lowered(name.removeprefix("SERVING_")), raw, Source.SERVING, name, ENVIRONMENT)
            elif name in SAGEMAKER_ACCEPTED:
                self.notes.append(SAGEMAKER_ACCEPTED[name].settle(name, raw, said(ENVIRONMENT, name)))
            elif name in SECURE_ONLY:
                continue  # server/hardening.py reads it, and configuration.py says so where that is off
            elif name.startswith(_WATCHED):
                _refuse_near(name)

    def _take_variable(self, name: str, raw: str) -> None:
        key, spelling = _VARIABLES[name]
        source = Source.ALIAS
        if name.startswith("SAGEMAKER_"):
            source = Source.SAGEMAKER
        elif name.startswith("LMCACHE_"):
            source = Source.LMCACHE_VARIABLE
        self.is_used |= source is Source.SAGEMAKER
        with each():
            self._give(key, spelling, raw, source, name, ENVIRONMENT)

    def _take(self, name: str, raw: str, source: Source, written: str, place: str) -> None:
        with each():
            self._take_one(name, raw, source, written, place)

    def _take_one(self, name: str, raw: str, source: Source, written: str, place: str) -> None:
        known = _NAMES.get(name.lower())
        if not raw.strip():
            return
        if known is not None:
            self._give(*known, raw, source, written, place)
        elif name.lower() in _ACCEPTED:
            plain = _ACCEPTED[name.lower()]
            self.notes.append(ACCEPTED[plain].settle(plain, raw, said(place, written)))
        elif name == _ADDRESS:
            self._give_address(raw, source, written, place)
        elif name.startswith(_OPTION) and name != _OPTION + CONFIG_FILE.name:
            option = unlisted(name.removeprefix(_OPTION).replace("-", "_"))
            self._give(option, Spelling(name), raw, source, written, place)
        else:
            prefix = "SERVING_" if source is Source.SERVING else ""
            near = (prefix + (known.upper() if prefix else known) for known in _plain_names())
            raise ConfigError(f"{said(place, written)}: there is no such key: {meant(written, near)}")

    def _give(self, key: Option, spelling: Spelling, raw: str, source: Source, written: str, place: str) -> None:
        self.givens.append(key.given(raw, source, written, place, spelling, raw.strip()))

    def _give_address(self, raw: str, source: Source, written: str, place: str) -> None:
        try:
            address = urlsplit(raw.strip())
            host, port = address.hostname, address.port
        except ValueError:
            host = port = None
        if host is None or port is None or address.scheme != "http":
            raise ConfigError(f"{said(place, written)} is {shown(written, raw)}: give http://ADDRESS:PORT")
        for key, value in (("host", host), ("port", port)):
            self.givens.append(Given(key, value, source, written, place, raw.strip()))


def lmi_names() -> tuple[str, ...]:
    """Every name that serving.properties may have, besides vLLM's own after `option.`."""
    return (*(spelling.name for key in KEYS for spelling in key.spellings), *ACCEPTED, _ADDRESS)


def spellings(key: str, source: Source) -> tuple[str, ...]:
    """How one source writes an option of the engine, for hints."""
    known = BY_NAME.get(key, unlisted(key))
    names: list[str] = [spelling.name for spelling in known.spellings]
    if source is Source.OPTION:
        return tuple("OPTION_" + name.removeprefix(_OPTION).upper() for name in names)
    return tuple(names)


def _plain_names() -> tuple[str, ...]:
    return tuple(name for name in lmi_names() if not name.startswith(_OPTION))


def _lowered(name: str) -> str:
    return name.lower() if _UPPER.fullmatch(name) else name


def _option(name: str) -> str:
    return "engine" if name == "ENGINE" else _OPTION + _lowered(name)


def _refuse_near(name: str) -> None:
    """Others may have variables with these prefixes, too; one that is nearly ours is a typo."""
    known = [*_VARIABLES, *SAGEMAKER_ACCEPTED, *SECURE_ONLY]
    if hint := did_you_mean(name, known, cutoff=_NEAR):
        raise ConfigError(f"{said(ENVIRONMENT, name)}: there is no such variable: {hint}")
