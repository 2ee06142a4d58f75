"""Faults inside the engine's app: the log has the cause, and the client the name under which it stands there."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError

from hotspan.http.errors import HttpError
from hotspan.http.exchange import JSON, REQUEST_ID

logger = logging.getLogger(__name__)


def name_faults(app: FastAPI) -> None:
    """Log what fails with the request's id, and tell clients the id in place of the exception's text.

    What the app answers with another status than 500 stays as it is. Mutates: the app, before its first request.
    """
    for kind, handler in list(app.exception_handlers.items()):
        if isinstance(kind, int) or issubclass(kind, HTTPException | RequestValidationError):
            continue
        app.add_exception_handler(kind, partial(_named, handler))
    app.middleware_stack = None  # made anew, should it have been made: it has its own copy of the handlers


async def _named(handler: Callable[[Request, Exception], Any], request: Request, error: Exception) -> Response:
    answer: Response = await handler(request, error)
    if answer.status_code != 500:
        return answer
    name = request.headers.get(REQUEST_ID, "unnamed")
    logger.error("request_failed request=%s path=%s", name, request.url.path, exc_info=error)
    told = HttpError(500, f"the engine failed on this request: its log has the reason, under {name}")
    return Response(told.content(), 500, media_type=JSON)
