"""YAML files of settings: a mapping whose names know their lines."""

from collections.abc import Callable
from pathlib import Path

import yaml

from hotspan.config.options import Option
from hotspan.config.origin import Entry, Given, Source
from hotspan.config.wrong import each
from hotspan.core.documents import UniqueKeys, read_text
from hotspan.core.errors import ConfigError


def parse_entries(text: str, path: Path) -> tuple[Entry, ...]:
    """The entries of a YAML file's mapping, in its order; none of an empty file.

    Raises: ConfigError that names the file, the line and what is wrong there.
    """
    try:
        loader = UniqueKeys(text)
        node = loader.get_single_node()
        if node is None:
            return ()
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path} is no mapping: write one `name: value` a line")
        document = loader.construct_document(node)
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line} is no YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} is no YAML ({type(error).__name__}): write one `name: value` a line") from None
    return tuple(Entry(str(name), value, f"{path}:{lines.get(str(name), 1)}") for name, value in document.items())


def read_options(path: Path, find: Callable[[Entry], Option]) -> list[Given]:
    """The options of a YAML file; names without a value are left out.

    find:   the option that an entry is; it may raise ConfigError.
    Raises: ConfigError for what is no YAML, or a value of the wrong type.
    """
    givens = []
    for entry in parse_entries(read_text(path), path):
        if entry.value is not None:
            with each():
                givens.append(find(entry).given(entry.value, Source.HOTSPAN_FILE, entry.name, entry.place))
    return givens
