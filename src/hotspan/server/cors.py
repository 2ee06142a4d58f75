"""Pages of other origins: what a browser needs to hear with every answer, refusals included."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from hotspan.core.errors import ConfigError


def with_cors(app: ASGIApp, values: Mapping[str, Any]) -> ASGIApp:
    """The app with CORS headers as vLLM's options allow them; the app itself if no origin is allowed.

    vLLM's own app adds them to its own answers only: neither to refusals for a missing key or a full queue, nor to
    LMI's routes.

    values: the engine's options by their names, as they were written or as its parser has them.
    Raises: ConfigError for a list that is none.
    """
    origins, methods, headers = (_texts(values, name) for name in ("origins", "methods", "headers"))
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_credentials=bool(values.get("allow_credentials")),
        allow_methods=methods or ["*"],
        allow_headers=headers or ["*"],
    )


def _texts(values: Mapping[str, Any], what: str) -> list[str]:
    name = f"allowed_{what}"
    given = values.get(name) or []
    try:
        return list(json.loads(given) if isinstance(given, str) else given)
    except (TypeError, ValueError) as error:
        flag = f"--allowed-{what}"
        raise ConfigError(f'{flag} is {given!r}: give a JSON list of text, such as ["https://a.example"]') from error
