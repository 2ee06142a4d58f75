"""Text in the bodies of requests."""

import json
from collections.abc import Iterator

import orjson

from hotspan.http.errors import HttpError
from hotspan.http.json_size import SLICE_BYTES

_HALVES = (b"\\ud", b"\\uD")
"""What a half of a surrogate pair is written with in JSON; bodies are UTF-8, which has no other way to write one."""


def check_characters(body: bytes) -> None:
    """Refuse JSON with half of a surrogate pair: no tokenizer takes it, and neither does the engine's wire.

    Bodies without such an escape are not parsed; of those that have one, nearly all are parsed once. What is no JSON is
    left to whoever reads it.
    Raises: HttpError 400.
    """
    for _ in checked_characters(body):
        pass


def checked_characters(body: bytes) -> Iterator[None]:
    """The same, with a pause after each slice but the last. Raises: HttpError 400."""
    for at in range(0, len(body), SLICE_BYTES):
        if at:
            yield
        end = at + SLICE_BYTES + len(_HALVES[0]) - 1
        if any(body.find(half, at, end) >= 0 for half in _HALVES):
            _check_pairs(body)
            return


def _check_pairs(body: bytes) -> None:
    try:
        orjson.loads(body)  # which takes whole pairs only
    except orjson.JSONDecodeError:
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise HttpError(400, "a text in the body holds half a surrogate pair: give whole characters") from error
        except (ValueError, RecursionError):
            return
