"""YAML files of settings: a mapping whose names know their lines."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import yaml

from hotspan.config.options import Option
from hotspan.config.origin import Entry, Given, Source
from hotspan.core.errors import ConfigError


class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """YAML in which a name written twice is an error instead of a silent loss."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        self.flatten_mapping(node)
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a name is a list or mapping", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} stands here twice", key_node.start_mark)
            seen.add(key)
        result: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return result


def read_text(path: Path) -> str:
    """A file's text. Raises: ConfigError that says why there is none."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path} can't be read ({error.strerror}): give another file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no UTF-8 text: give a YAML file") from error


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
    return [
        find(entry).given(entry.value, Source.HOTSPAN_FILE, entry.name, entry.place)
        for entry in parse_entries(read_text(path), path)
        if entry.value is not None
    ]
