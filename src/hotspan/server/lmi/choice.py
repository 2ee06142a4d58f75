"""Which adapter, which session and which schema a request asks for."""

from collections.abc import Mapping
from enum import Enum
from typing import Any

from hotspan.http.errors import HttpError
from hotspan.server.lmi.sessions import CLOSE, NEW

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"


class Schema(Enum):
    """What the body of an invocation is. The value is the engine's route."""

    EMBEDDING = "/v1/embeddings"
    COMPLETION = "/v1/completions"
    LMI = "lmi"
    CHAT = "/v1/chat/completions"
    ENGINE = "/invocations"


_BY_KEY = {"prompt": Schema.COMPLETION, "inputs": Schema.LMI, "messages": Schema.CHAT}
_ENGINES_OWN = ("input", "query", "queries", "text_1", "data_1", "documents")
"""Keys of pooling, scoring and ranking, which the engine's own /invocations tells apart."""


def chosen_schema(payload: Mapping[str, Any], *, is_embedding: bool) -> Schema:
    """The schema of a body, by the first key that is in it. Raises: HttpError 400."""
    if is_embedding and "inputs" in payload:
        return Schema.EMBEDDING
    for key, schema in _BY_KEY.items():
        if key in payload:
            return schema
    if any(key in payload for key in _ENGINES_OWN):
        return Schema.ENGINE
    raise HttpError(
        400, f"the request has none of {', '.join(_BY_KEY)}, requestType: one of them says what it asks for"
    )


def take_adapter(payload: dict[str, Any], headers: Mapping[str, str], base_names: tuple[str, ...]) -> str | None:
    """The adapter that a request names, by header, then `adapters`, then `model`; None for the base model.

    Mutates: `payload`, which no longer has `adapters`.
    Raises:  HttpError 400.
    """
    given = payload.pop("adapters", None)
    model = payload.get("model")
    if isinstance(model, str) and model in base_names:
        model = None
    if headers.get(ADAPTER_HEADER):
        name: object = headers[ADAPTER_HEADER]
    elif given is not None:
        name = given[0] if isinstance(given, list) and len(given) == 1 else given
    else:
        name = model
    if name is not None and not isinstance(name, str):
        param = "model" if given is None else "adapters"
        raise HttpError(400, f"{param} is {name!r:.80}: give the name of one adapter", param=param)
    return name or None


def session_request(payload: Mapping[str, Any]) -> str | None:
    """What a session request asks, NEW or one of CLOSE; None if the payload is none. Raises: HttpError 400."""
    if "requestType" not in payload or any(key in payload for key in _BY_KEY):
        return None
    asked = payload["requestType"]
    if asked not in (NEW, *CLOSE):
        raise HttpError(400, f"requestType is {asked!r:.80}: give {NEW} or {CLOSE[0]}", param="requestType")
    return str(asked)
