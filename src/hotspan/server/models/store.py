"""A directory with several models: which directory is one, and what it holds."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from hotspan.config.keys import CONFIG_FILE
from hotspan.config.lmi import LmiReader
from hotspan.config.origin import resolve
from hotspan.config.own import CommandLine, read_command_line, read_file, read_variables
from hotspan.core.errors import ConfigError
from hotspan.plan.weights import is_model

ARCHIVES = (".tar.gz", ".tgz", ".tar", ".zip")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class StoredModel:
    """One model of a store: what clients call it, and its directory or archive."""

    name: str
    path: Path

    @property
    def is_archive(self) -> bool:
        """Whether it has to be unpacked first."""
        return not self.path.is_dir()


@dataclass(frozen=True, slots=True)
class ModelStore:
    """A directory whose every entry is a model.

    is_container: nobody named it: it is where LMI's container has its models.
    """

    directory: Path
    models: tuple[StoredModel, ...]
    is_container: bool


def model_store(command_line: CommandLine, surroundings: Mapping[str, str], container: Path) -> ModelStore | None:
    """The store that is to be served; None if what is to be served is one model.

    Raises: ConfigError as `load_configuration`, or for an entry of a store that can't be served.
    """
    named = _named(command_line, surroundings)
    directory = container if named is None else Path(named).expanduser()
    models = stored_models(directory)
    return None if models is None else ModelStore(directory, models, named is None)


def stored_models(directory: Path) -> tuple[StoredModel, ...] | None:
    """The models in `directory`, if it is a store; None if it is something else, or holds but one directory.

    Raises: ConfigError for an entry of a store that can't be served.
    """
    if not directory.is_dir() or is_model(directory):
        return None
    entries = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    archives = [path for path in entries if path.is_file() and path.name.lower().endswith(ARCHIVES)]
    directories = [path for path in entries if path.is_dir()]
    models = [path for path in directories if is_model(path)]
    if len(archives) + len(directories) < len(entries) or (not archives and len(models) < 2):
        return None
    for path in directories:
        if path not in models:
            raise ConfigError(
                f"{path} is no model: it has neither config.json nor serving.properties. Take it out of {directory}, "
                "where each directory and archive is a model of its own"
            )
    found = tuple(sorted((StoredModel(_name(path), path) for path in [*models, *archives]), key=lambda one: one.name))
    for one, other in pairwise(found):
        if one.name == other.name:
            raise ConfigError(f"{one.path} and {other.path} are both called {one.name}: rename one of them")
    return found


def _named(command_line: CommandLine, surroundings: Mapping[str, str]) -> str | None:
    """The model that the configuration names, from whichever source."""
    reader = LmiReader()
    reader.read_variables(surroundings)
    givens = [*read_command_line(command_line), *read_variables(surroundings), *reader.givens]
    file = resolve(givens).get(CONFIG_FILE.name)
    if file is not None:
        givens += read_file(Path(file.value).expanduser())
    model = resolve(givens).get("model")
    return None if model is None else str(model.value)


def _name(path: Path) -> str:
    suffix = next((end for end in ARCHIVES if path.is_file() and path.name.lower().endswith(end)), "")
    name = path.name[: len(path.name) - len(suffix)]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{path} can't be a model's name in a URL: rename it, to letters, digits, dots, dashes and underscores"
        )
    return name
