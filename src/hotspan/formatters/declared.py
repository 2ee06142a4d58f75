"""`formatter.yaml`: formatters that need no code.

input:
  schema: {type: object, required: [inputs]}
  prefix: "Answer in one sentence. "
  defaults: {max_new_tokens: 64}
output:
  metadata: {request: $request_id, served_by: "team a"}
  rename: {generated_text: answer}
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

from hotspan.core.documents import UniqueKeys, read_text
from hotspan.core.errors import ConfigError, did_you_mean
from hotspan.formatters.formatter import Context, Formatter, Phase
from hotspan.formatters.rules import (
    INPUT_VARIABLES,
    OUTPUT_VARIABLES,
    VARIABLES,
    InputRules,
    OutputRules,
    Schema,
    Template,
)

_INPUT_FIELDS = ("schema", "prefix", "suffix", "template", "defaults")
_READABLE = "write it as UTF-8 text, and let the server's user read it"
_OUTPUT_FIELDS = ("template", "metadata", "rename", "schema")

_Made = TypeVar("_Made")


def load_declared(file: Path) -> dict[Phase, Formatter]:
    """The formatters of a `formatter.yaml`.

    Raises: ConfigError that names the file, the key, and what to write.
    """
    return _Reader(file).read()


class _Reader:
    """One file's way from text to formatters."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def read(self) -> dict[Phase, Formatter]:
        document = self._section(self._document(), "the file", tuple(Phase))
        if not document:
            raise self._wrong("is empty: write a section input or output, or take it away")
        rules: dict[Phase, Callable[[Any, Context], Any]] = {}
        if Phase.INPUT in document:
            rules[Phase.INPUT] = self._input(self._section(document[Phase.INPUT], Phase.INPUT, _INPUT_FIELDS)).apply
        if Phase.OUTPUT in document:
            rules[Phase.OUTPUT] = self._output(
                self._section(document[Phase.OUTPUT], Phase.OUTPUT, _OUTPUT_FIELDS)
            ).apply
        where = f"{self._file.parent.name}/{self._file.name}"
        return {phase: Formatter(phase, f"{where}:{phase}", self._file, apply) for phase, apply in rules.items()}

    def _document(self) -> Any:
        try:
            document = yaml.load(read_text(self._file, remedy=_READABLE), UniqueKeys)
            json.dumps(document, allow_nan=False)
        except yaml.MarkedYAMLError as error:
            line = f"line {error.problem_mark.line + 1}" if error.problem_mark is not None else "somewhere"
            raise self._wrong(f"is no YAML: {line}: {error.problem}. Correct it there") from None
        except (yaml.YAMLError, RecursionError) as error:
            raise self._wrong(f"is no YAML: {error}. Write it as UTF-8 text") from None
        except (TypeError, ValueError) as error:
            raise self._wrong(f"holds what JSON can't: {error}. Put dates and the like in quotes") from None
        return document

    def _input(self, fields: Mapping[str, Any]) -> InputRules:
        return InputRules(
            schema=self._made(fields, "input.schema", dict, Schema),
            defaults=self._made(fields, "input.defaults", dict, dict),
            template=self._made(fields, "input.template", str, lambda text: Template(text, INPUT_VARIABLES)),
            prefix=self._made(fields, "input.prefix", str, str) or "",
            suffix=self._made(fields, "input.suffix", str, str) or "",
        )

    def _output(self, fields: Mapping[str, Any]) -> OutputRules:
        return OutputRules(
            template=self._made(fields, "output.template", str, lambda text: Template(text, OUTPUT_VARIABLES)),
            metadata=self._made(fields, "output.metadata", dict, _metadata),
            rename=self._made(fields, "output.rename", dict, _renames),
            schema=self._made(fields, "output.schema", dict, Schema),
        )

    def _made(self, fields: Mapping[str, Any], where: str, kind: type, make: Callable[[Any], _Made]) -> _Made | None:
        """What `make` makes of a field, or None if it is not there."""
        value = fields.get(where.partition(".")[2])
        if value is None:
            return None
        if not isinstance(value, kind):
            wanted = "a text, in quotes if it looks like something else" if kind is str else "names with values"
            raise self._wrong(f"has {where} {value!r}: write {wanted}")
        try:
            return make(value)
        except ValueError as error:
            raise self._wrong(f"has a wrong {where}: it {error}") from None

    def _section(self, given: Any, where: str, known: Collection[str]) -> Mapping[str, Any]:
        if given is None:
            return {}
        if not isinstance(given, dict):
            raise self._wrong(f"has no names in {where}: write {', '.join(known)}, with a colon and the value behind")
        for name in given:
            if name not in known:
                hint = did_you_mean(str(name), known, f"it may be {', '.join(known)}")
                raise self._wrong(f"has an unknown {name!r} in {where}: {hint}")
        return given

    def _wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._file} {problem}")


def _metadata(given: dict[str, Any]) -> dict[str, Any]:
    for text in _texts(given):
        if text.startswith("$") and not text.startswith("$$") and text[1:] not in VARIABLES:
            known = [f"${name}" for name in sorted(VARIABLES)]
            hint = did_you_mean(text, known, f"it may be {', '.join(known)}")
            raise ValueError(f"names {text}: {hint}. Write $${text[1:]} for the text {text} itself")
    return given


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [value] if isinstance(value, str) else []


def _renames(given: dict[str, Any]) -> dict[str, str]:
    targets = list(given.values())
    for name, target in given.items():
        if not isinstance(target, str):
            raise ValueError(f"has {target!r} as the new name of {name}: write a text")
        if targets.count(target) > 1:
            raise ValueError(f"gives several fields the name {target}: give each its own")
    return given
