"""Files that users write: text in UTF-8, and YAML in which no name is lost."""

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from hotspan.core.errors import ConfigError


def read_text(path: Path, name: str = "", remedy: str = "give another file") -> str:
    """A file's text.

    name:   what the error begins with: the option that names the file.
    Raises: ConfigError that says why there is none.
    """
    said = f"{name} {path}".strip()
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{said} can't be read ({error.strerror}): {remedy}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{said} can't be read (it is no UTF-8 text): {remedy}") from error


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
