"""What the rules of `formatter.yaml` do to a payload and to an answer, with its Jinja templates and JSON schemas."""

import copy
import datetime
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2
import jsonschema
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jsonschema.exceptions import best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from hotspan.formatters.formatter import Context

_MAX_TEXT = 200
_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)

VARIABLES = frozenset({"adapter", "request_id", "time"})
"""What templates and metadata may name besides the payload or answer."""

INPUT_VARIABLES = VARIABLES | {"text", "payload"}
OUTPUT_VARIABLES = VARIABLES | {"text", "output"}


class Template:
    """A Jinja template, checked once, that reads nothing but the variables that it is given, and can't change them."""

    def __init__(self, source: str, variables: frozenset[str]) -> None:
        """Raises: ValueError that says what is wrong with the template."""
        try:
            unknown = meta.find_undeclared_variables(_ENVIRONMENT.parse(source)) - variables
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"is no template: line {error.lineno}: {error.message}") from None
        if unknown:
            names = ", ".join(sorted(unknown))
            raise ValueError(f"asks for {names}, and there is only {', '.join(sorted(variables))}")

    def render(self, variables: dict[str, Any]) -> str:
        """The text. Raises: ValueError if a field is missing that the template asks for."""
        try:
            return self._template.render(variables)
        except jinja2.UndefinedError as error:
            raise ValueError(f"the template asks for what is missing: {error.message}") from error


class Schema:
    """What a payload or an answer must look like: JSON Schema, draft 2020-12 unless it names another."""

    def __init__(self, schema: dict[str, Any]) -> None:
        """Raises: ValueError that says what is wrong with the schema; nothing is ever fetched for a `$ref`."""
        kind = validator_for(schema, default=jsonschema.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except jsonschema.SchemaError as error:
            raise ValueError(f"is no JSON schema: {error.json_path}: {error.message[:_MAX_TEXT]}") from None
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
            raise ValueError(f"{error.json_path}: {error.message[:_MAX_TEXT]}")


def _references(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [reference for item in schema for reference in _references(item)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("$ref")
    return ([own] if isinstance(own, str) else []) + _references(list(schema.values()))


def _variables(context: Context, answer: Any = None) -> dict[str, Any]:
    """`request_id` is the client's, or else the one that the answer carries."""
    answered = answer.get("id") if isinstance(answer, dict) else None
    time = datetime.datetime.fromtimestamp(context.time_s, datetime.UTC).isoformat(timespec="milliseconds")
    return {"adapter": context.adapter, "request_id": context.request_id or answered, "time": time}


@dataclass(frozen=True, slots=True)
class InputRules:
    """A payload must fit `schema`, lacks nothing of `defaults` afterwards, and its text is put into `template`."""

    schema: Schema | None = None
    defaults: Mapping[str, Any] | None = None
    template: Template | None = None
    prefix: str = ""
    suffix: str = ""

    def apply(self, payload: dict[str, Any], context: Context) -> dict[str, Any]:
        """The payload as the rules want it; raises ValueError if it is not what they ask for."""
        if self.schema is not None:
            self.schema.check(payload)
        if not any(field in payload for field in FIELDS):
            return payload  # it opens or closes a session
        if self.template is not None or self.prefix or self.suffix:
            variables = _variables(context) | {"payload": payload}

            def changed(text: str) -> str:
                inner = text if self.template is None else self.template.render(variables | {"text": text})
                return f"{self.prefix}{inner}{self.suffix}"

            payload = with_text(payload, changed)
        if not self.defaults:
            return payload
        defaults = copy.deepcopy(dict(self.defaults))  # what serves the request may change it
        if "inputs" not in payload:
            return defaults | payload
        parameters = payload.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise ValueError("parameters is no object")
        return payload | {"parameters": defaults | (parameters or {})}


@dataclass(frozen=True, slots=True)
class OutputRules:
    """An answer is put into `template`, gets `metadata`, has fields renamed, and must fit `schema` then."""

    template: Template | None = None
    metadata: Mapping[str, Any] | None = None
    rename: Mapping[str, str] | None = None
    schema: Schema | None = None

    def apply(self, answer: Any, context: Context) -> Any:
        """The answer, or chunk of one, as the rules want it; raises ValueError if that can't be made of it."""
        variables = _variables(context, answer)
        if self.template is not None:
            rendered = self.template.render(variables | {"output": answer, "text": answer_text(answer)})
            parsed = _object(rendered)
            answer = rendered if parsed is None else parsed
        if not (self.metadata or self.rename or self.schema):
            return answer
        if not isinstance(answer, dict):
            raise ValueError("metadata, rename and schema need an object, and the answer is a text")
        if self.metadata:
            own = answer.get("metadata")
            filled = _filled(self.metadata, variables)
            answer = answer | {"metadata": {**(own if isinstance(own, dict) else {}), **filled}}
        if self.rename:
            renamed = {self.rename.get(name, name): value for name, value in answer.items()}
            if len(renamed) < len(answer):
                raise ValueError(f"rename gives a field a name that another has: {', '.join(answer)}")
            answer = renamed
        if self.schema is not None:
            self.schema.check(answer)
        return answer


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a template rendered, if it is one."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _filled(value: Any, variables: Mapping[str, Any]) -> Any:
    """`value` with what each text "$name" stands for in its place; a text "$$..." stands for "$..."."""
    if isinstance(value, dict):
        return {name: _filled(item, variables) for name, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables) for item in value]
    if isinstance(value, str) and value.startswith("$"):
        return value[1:] if value.startswith("$$") else variables[value[1:]]
    return value


# -- where a payload's and an answer's text is, in each schema that the server speaks --------------------------------

_TEXT_FIELDS = ("prompt", "inputs")  # the server looks for them in this order too
FIELDS = (*_TEXT_FIELDS, "messages")


def with_text(payload: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """A copy of `payload` whose text went through `change`.

    Its text is that of `prompt` or `inputs`, each one if there are several, or else the last user message.
    A payload without text comes back as it is.
    Raises: ValueError if `prompt` or `inputs` holds something else, such as token ids.
    """
    for field in _TEXT_FIELDS:
        if field in payload:
            return payload | {field: _changed(field, payload[field], change)}
    messages = payload.get("messages")
    if not isinstance(messages, list):
        return payload
    for place in reversed(range(len(messages))):
        message = messages[place]
        if isinstance(message, dict) and message.get("role") == "user" and "content" in message:
            content = _changed_content(message["content"], change)
            return payload | {"messages": [*messages[:place], message | {"content": content}, *messages[place + 1 :]]}
    return payload


def _changed(field: str, value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return [change(text) for text in value]
    raise ValueError(f"{field} is neither a text nor a list of texts")


def _changed_content(content: Any, change: Callable[[str], str]) -> Any:
    """A message's content: a text, or parts of which the first text is the one."""
    if isinstance(content, str):
        return change(content)
    if isinstance(content, list):
        for place, part in enumerate(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                return [*content[:place], part | {"text": change(part["text"])}, *content[place + 1 :]]
    return content


def answer_text(answer: Any) -> str:
    """The text that an answer or a streamed chunk brings; "" if it brings none."""
    if isinstance(answer, str):
        return answer
    if not isinstance(answer, dict):
        return ""
    choices = answer.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    places = (
        (answer.get("token"), "text"),  # LMI, streamed: the last chunk has the whole text in generated_text besides
        (answer, "generated_text"),
        (choice, "text"),
        (choice.get("delta"), "content"),
        (choice.get("message"), "content"),
    )
    for holder, field in places:
        if isinstance(holder, dict) and isinstance(holder.get(field), str):
            return str(holder[field])
    return ""
