"""Jinja templates of `formatter.yaml`, compiled and checked once."""

from typing import Any

import jinja2
from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)


class Template:
    """A template that reaches nothing but the variables that it is given, and can't change them."""

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
