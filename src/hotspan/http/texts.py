"""Text in the bodies of requests."""

import json
import re
from collections.abc import Generator

from hotspan.http.errors import HttpError
from hotspan.http.json_size import SLICE_BYTES, may_be_json

_HALVES = (b"\\ud", b"\\uD")
"""What a half of a surrogate pair is written with in JSON; bodies are UTF-8, which has no other way to write one."""

_WHOLE = re.compile(
    rb"(?:[^\\]{1,32}+|\\[^u]|\\u(?![dD][89a-fA-F])"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}){1,8192}+",
    re.DOTALL,
)
"""Text, escapes and pairs, as many as are looked at without a pause: 0.5 ms."""


def check_characters(body: bytes) -> None:
    """Refuse JSON with half of a surrogate pair: no tokenizer takes it, and neither does the engine's wire.

    What is no JSON is left to whoever reads it. Of bodies that seem to have one, those of at most 64 KiB are parsed.
    Raises: HttpError 400.
    """
    for _ in checked_characters(body):
        pass


def checked_characters(body: bytes) -> Generator[None, None, None]:
    """The same, with a pause after each slice but the last. Raises: HttpError 400."""
    for at in range(0, len(body), SLICE_BYTES):
        if at:
            yield
        end = at + SLICE_BYTES + len(_HALVES[0]) - 1
        if any(body.find(half, at, end) >= 0 for half in _HALVES):
            if (yield from _has_half(body)) and may_be_json(body):
                _check_pairs(body)
            return


def _has_half(body: bytes) -> Generator[None, None, bool]:
    """Whether an escape in a body is half a pair, or broken."""
    at = 0
    while at < len(body):
        found = _WHOLE.match(body, at)
        if found is None:
            return True
        at = found.end()
        yield
    return False


def _check_pairs(body: bytes) -> None:
    """Raise HttpError 400 for JSON that has one. A large one is not parsed for that."""
    if len(body) <= SLICE_BYTES:
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            pass
        except (ValueError, RecursionError):
            return
        else:
            return
    raise HttpError(400, "a text in the body holds half a surrogate pair: give whole characters")
