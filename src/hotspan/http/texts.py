"""Text in the bodies of requests."""

import json

import orjson

from hotspan.http.errors import HttpError

_HALVES = (b"\\ud", b"\\uD")
"""What a half of a surrogate pair is written with in JSON; bodies are UTF-8, which has no other way to write one."""


def check_characters(body: bytes) -> None:
    """Refuse JSON with half of a surrogate pair: no tokenizer takes it, and neither does the engine's wire.

    Bodies without such an escape are not parsed; of those that have one, nearly all are parsed once. What is no JSON is
    left to whoever reads it.
    Raises: HttpError 400.
    """
    if not any(half in body for half in _HALVES):
        return
    try:
        orjson.loads(body)  # which takes whole pairs only
    except orjson.JSONDecodeError:
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise HttpError(400, "a text in the body holds half a surrogate pair: give whole characters") from error
        except (ValueError, RecursionError):
            return
