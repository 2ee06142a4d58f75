"""How much a body of JSON holds, counted before it is parsed: a parsed value takes many times its bytes, and time.

Bodies are counted in slices, between which an event loop can do other work.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hotspan.http.errors import HttpError

MAX_VALUES = 1 << 20
"""Of one body, such as the tokens of a prompt: more than any model's context."""

MAX_CONTAINERS = 1 << 16
"""Objects and lists of one body, such as messages, tools and their parts."""

SLICE_BYTES = 1 << 16
"""Of a body, looked at without a pause: 0.1 ms, or 3 ms where it is full of quotes."""

_JSON = re.compile(rb"\s*+[\[{]")
_STRING = re.compile(rb'"[^"]*"')
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"{[,')


@dataclass(frozen=True, slots=True)
class JsonLimit:
    """What one body may hold outside of its strings. containers: objects and lists."""

    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS

    def holds(self, commas: int, containers: int) -> bool:
        """Whether a body with so many is within the limit."""
        return containers <= self.containers and 1 + commas + containers <= self.values


DEFAULT_LIMIT = JsonLimit()


def most_values(body: bytes) -> int:
    """At least as many values as a body has, with what is in its strings. Three passes over it."""
    return 1 + body.count(b",") + body.count(b"{") + body.count(b"[")


def check_json(body: bytes, limit: JsonLimit = DEFAULT_LIMIT) -> None:
    """Raise HttpError 413 for a body of JSON that holds more than a request needs. Linear in the body."""
    for _ in checked_json(body, limit):
        pass


def checked_json(body: bytes, limit: JsonLimit = DEFAULT_LIMIT) -> Iterator[None]:
    """The same, with a pause after each slice but the last. Raises: HttpError 413."""
    if not _JSON.match(body):
        return
    commas = containers = 0
    for at in range(0, len(body), SLICE_BYTES):
        if at:
            yield
        end = at + SLICE_BYTES
        commas += body.count(b",", at, end)
        containers += body.count(b"{", at, end) + body.count(b"[", at, end)
        if not limit.holds(commas, containers):  # with what is in its strings
            yield from _outside_strings(body, limit)
            return


def _outside_strings(body: bytes, limit: JsonLimit) -> Iterator[None]:
    """The check, of what is outside of strings alone."""
    at = commas = containers = 0
    in_string = False
    while at < len(body):
        part = body[at : at + SLICE_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = body[at : at + len(part) + 1]  # with what is escaped by its last byte
        at += len(part)
        marks = part.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
        if in_string:
            _, quote, marks = marks.partition(b'"')
            in_string = not quote
        marks, quote, _ = _STRING.sub(b"", marks).partition(b'"')
        in_string = in_string or bool(quote)
        commas += marks.count(b",")
        containers += marks.count(b"{") + marks.count(b"[")
        if not limit.holds(commas, containers):
            raise HttpError(
                413,
                f"the body holds more than {limit.values:,} values, or more than {limit.containers:,} objects and "
                "lists: send less at a time",
            )
        yield
