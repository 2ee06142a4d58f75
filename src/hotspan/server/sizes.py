"""Whether a request's text can fit the model at all, told from its size, before anything is made of it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hotspan.core.types import MIB
from hotspan.http.bodies import ROUTE_NEEDS, TEXT_NEEDS
from hotspan.http.errors import HttpError
from hotspan.http.json_size import DEFAULT_LIMIT, JsonLimit
from hotspan.http.paths import MAX_SMALL_BYTES

_TEXT_TYPES = (None, "text", "input_text", "output_text", "refusal")
"""Types of parts of a message that are text; what other parts carry, such as images, is not tokenised."""

_BYTES_PER_CHAR = 6
"""Of a character as JSON escapes it."""

_OTHER_BYTES, _OTHER_CONTAINERS, _OTHER_VALUES = MIB, 1024, 1 << 16
"""What a body may have besides its text: other fields, and further prompts."""

_FIELDS_PER_CONTAINER = 4

_BATCHES = ("prompt", "inputs")
"""Fields that may be a list of prompts, each of which has to fit."""

_VALUES_PER_TOKEN = 16
"""A body may have lists of tokens for so many prompts."""


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """What a body may have at most. bytes: None leaves them to the server's limit for all, otherwise `needs` says why.
    json: what is in it."""

    bytes: int | None = None
    json: JsonLimit = DEFAULT_LIMIT
    needs: str = TEXT_NEEDS


ANY_BODY = BodyLimit()
SMALL_BODY = BodyLimit(MAX_SMALL_BYTES, needs=ROUTE_NEEDS)


@dataclass(frozen=True, slots=True)
class TextLimit:
    """What a request's prompt may have at most. chars: of the text of so many tokens, each of the longest."""

    tokens: int
    chars: int

    def of_bodies(self) -> BodyLimit:
        """What a body with such a prompt can need: a message, a part or a tool is at least a token of it."""
        return BodyLimit(
            _OTHER_BYTES + _BYTES_PER_CHAR * self.chars,
            JsonLimit(
                min(DEFAULT_LIMIT.values, _OTHER_VALUES + _VALUES_PER_TOKEN * self.tokens),
                min(DEFAULT_LIMIT.containers, _OTHER_CONTAINERS + self.tokens),
                min(DEFAULT_LIMIT.fields, _OTHER_VALUES + _FIELDS_PER_CONTAINER * self.tokens),
            ),
        )

    def check_text(self, prompt: object) -> None:
        """Raise HttpError 400 for a text or a list of tokens that cannot fit."""
        if isinstance(prompt, str) and len(prompt) > self.chars:
            raise self._refused(f"{len(prompt)} characters")
        if isinstance(prompt, list) and len(prompt) > self.tokens and set(map(type, prompt)) == {int}:
            raise self._refused(f"{len(prompt)} tokens")

    def check_chat(self, *fields: object) -> None:
        """The same for all text in messages and what else a template is given."""
        if (chars := _chars(fields)) > self.chars:
            raise self._refused(f"{chars} characters")

    def check_body(self, body: bytes) -> None:
        """The same for a body that may have either. Bodies that are no JSON are left to whoever reads them."""
        if len(body) <= min(self.chars, 2 * self.tokens):
            return
        try:
            said = json.loads(body)
        except (ValueError, RecursionError):
            return
        if isinstance(said, Mapping):
            for name, value in said.items():
                for each in value if name in _BATCHES and isinstance(value, list) else [value]:
                    self.check_text(each)
                self.check_text(value)
            self.check_chat(*(value for name, value in said.items() if name not in _BATCHES))

    def _refused(self, size: str) -> HttpError:
        message = f"the text has {size}, and this model takes {self.tokens} tokens, at most {self.chars} characters"
        return HttpError(400, message)


def _chars(fields: object) -> int:
    """Characters of all strings, but for those in parts of messages that are no text."""
    found, stack = 0, [fields]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found += len(value)
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, Mapping):
            for name, each in value.items():
                if name == "content" and isinstance(each, list):
                    stack += (part for part in each if _is_text(part))
                else:
                    stack.append(each)
    return found


def _is_text(part: Any) -> bool:
    return not isinstance(part, Mapping) or part.get("type") in _TEXT_TYPES
