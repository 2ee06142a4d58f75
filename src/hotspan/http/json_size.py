"""How much a body of JSON holds, counted before it is parsed: a parsed value takes many times its bytes, and time.

Bodies are counted in slices, between which an event loop can do other work.
"""

import re
from collections.abc import Generator
from dataclasses import dataclass

from hotspan.http.errors import HttpError

MAX_VALUES = 1 << 20
"""Of one body, such as the tokens of a prompt: more than any model's context."""

MAX_CONTAINERS = 1 << 16
"""Objects and lists of one body, such as messages, tools and their parts."""

MAX_FIELDS = 1 << 18
"""Of all objects of one body. A field takes four times as long to parse as a number in a list."""

SLICE_BYTES = 1 << 16
"""Of a body, looked at without a pause: 0.1 ms, or 3 ms where it is full of quotes."""

_JSON = re.compile(rb"[\s\x00\xef\xbb\xbf\xfe\xff]*+(?:[\[{\"]|\Z)")
"""Up to the first object, list or string, with the marks of encodings that a parser takes off; or nothing but these."""

_MARKS = (b"\xff\xfe", b"\xfe\xff")
"""Of UTF-16 and UTF-32, which without one have a zero in their first two bytes, as JSON begins with ASCII."""
_STRING = re.compile(rb'"[^"]*"')
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"{[,:')


@dataclass(frozen=True, slots=True)
class JsonLimit:
    """What one body may hold outside of its strings. containers: objects and lists. fields: of all objects."""

    values: int = MAX_VALUES
    containers: int = MAX_CONTAINERS
    fields: int = MAX_FIELDS

    def holds(self, commas: int, containers: int, colons: int) -> bool:
        """Whether a body with so many is within the limit."""
        is_within = containers <= self.containers and colons <= self.fields
        return is_within and 1 + commas + containers <= self.values


DEFAULT_LIMIT = JsonLimit()


def most_containers(body: bytes) -> int:
    """At least as many objects and lists as a body has, with what is in its strings. Two passes over it, in one go."""
    return body.count(b"{") + body.count(b"[")


def check_json(body: bytes, limit: JsonLimit = DEFAULT_LIMIT) -> None:
    """Raise HttpError 413 for a body of JSON that holds more than a request needs. Linear in the body."""
    for _ in checked_json(body, limit):
        pass


def checked_json(body: bytes, limit: JsonLimit = DEFAULT_LIMIT) -> Generator[None, None, None]:
    """The same, with a pause after each slice but the last. Raises: HttpError 413; 400 if it is not UTF-8."""
    if len(body) > 4 and (body[:2] in _MARKS or 0 in body[:2]) and may_be_json(body):
        raise HttpError(400, "the body is JSON in UTF-16 or UTF-32: send UTF-8")
    if not (yield from is_within(body, limit)):
        raise HttpError(
            413,
            f"the body holds more than {limit.values:,} values, {limit.containers:,} objects and lists or "
            f"{limit.fields:,} fields: send less at a time",
        )


def is_within(body: bytes, limit: JsonLimit) -> Generator[None, None, bool]:
    """Whether a body holds no more than `limit`, or is no JSON; counted up to there, with the same pauses."""
    if not may_be_json(body):
        return True
    commas = containers = colons = 0
    for at in range(0, len(body), SLICE_BYTES):
        if at:
            yield
        end = at + SLICE_BYTES
        commas += body.count(b",", at, end)
        containers += body.count(b"{", at, end) + body.count(b"[", at, end)
        colons += body.count(b":", at, end)
        if not limit.holds(commas, containers, colons):  # with what is in its strings
            return (yield from _is_within_outside_strings(body, limit))
    return True


def may_be_json(body: bytes) -> bool:
    """Whether a body is JSON by its beginning: what else clients send, such as sound, is not counted."""
    return _JSON.match(body, 0, SLICE_BYTES) is not None


def _is_within_outside_strings(body: bytes, limit: JsonLimit) -> Generator[None, None, bool]:
    """The same, of what is outside of strings alone."""
    at = commas = containers = colons = 0
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
        colons += marks.count(b":")
        if not limit.holds(commas, containers, colons):
            return False
        yield
    return True
