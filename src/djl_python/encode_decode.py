"""The decoder that LMI's documented `model.py` imports."""

import json
from typing import Any


def decode(payload: Any, content_type: str | None = None) -> Any:
    """A payload as it is if it was decoded before, as hotspan's are; the value of a JSON text otherwise.

    Raises: ValueError if it is a text, and no JSON.
    """
    if not isinstance(payload, str | bytes | bytearray):
        return payload
    if content_type is not None and "json" not in content_type:
        raise ValueError(f"the payload is {content_type}: send JSON")
    return json.loads(payload)
