"""How much a body of JSON holds, counted before it is parsed: a parsed value takes many times its bytes, and time."""

import re

from hotspan.http.errors import HttpError

MAX_VALUES = 1 << 20
"""Of one body, such as the tokens of a prompt: more than any model's context."""

MAX_CONTAINERS = 1 << 16
"""Objects and lists of one body, such as messages, tools and their parts."""

_JSON = re.compile(rb"\s*[\[{]")
_STRING = re.compile(rb'"[^"]*"')
_NOT_STRUCTURE = bytes(byte for byte in range(256) if byte not in b'"{[,')


def most_values(body: bytes) -> int:
    """At least as many values as a body has, with what is in its strings. Three passes over it."""
    return 1 + body.count(b",") + most_containers(body)


def most_containers(body: bytes) -> int:
    """The same for its objects and lists."""
    return body.count(b"{") + body.count(b"[")


def check_json(body: bytes) -> None:
    """Raise HttpError 413 for a body of JSON that holds more than a request needs. Linear in the body."""
    if not _JSON.match(body) or (most_containers(body) <= MAX_CONTAINERS and most_values(body) <= MAX_VALUES):
        return
    # Without its strings: what remains when escaped quotes are gone, and all between two others.
    plain = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NOT_STRUCTURE)
    if plain.count(b'"') <= 4 * MAX_VALUES:  # names and values
        plain = _STRING.sub(b"", plain)
        if most_containers(plain) <= MAX_CONTAINERS and most_values(plain) <= MAX_VALUES:
            return
    raise HttpError(
        413,
        f"the body holds more than {MAX_VALUES:,} values, or more than {MAX_CONTAINERS:,} objects and lists: send less "
        "at a time",
    )
