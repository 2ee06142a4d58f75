"""JSON schemas of `formatter.yaml`."""

from typing import Any

import jsonschema
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

_MOST_TEXT = 200


class Schema:
    """What a payload or an answer must look like: JSON Schema, draft 2020-12 unless it names another."""

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises: ValueError that says what is wrong with the schema; nothing is ever fetched for a `$ref`."""
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"is no JSON schema: {error.json_path}: {error.message[:_MOST_TEXT]}") from None
        root = Registry().with_resource("", DRAFT202012.create_resource(schema)).resolver()
        for reference in _references(schema):
            try:
                root.lookup(reference)
            except Unresolvable:
                raise ValueError(f"refers to {reference}, which is not in it: use references within the file") from None
        self._validator = kind(schema, registry=Registry())

    def check(self, value: Any) -> None:
        """Raises: ValueError that says where `value` does not fit, and why."""
        error = best_match(self._validator.iter_errors(value))
        if error is not None:
            raise ValueError(f"{error.json_path}: {error.message[:_MOST_TEXT]}")


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [reference for item in schema for reference in _references(item)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("$ref")
    return ([own] if isinstance(own, str) else []) + _references(list(schema.values()))
