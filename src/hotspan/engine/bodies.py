"""Bodies that trip up vLLM's own checks of them: the client's mistake, and answered as one."""

import traceback
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from hotspan.engine.entrypoints import create_error_response

_TRIPS = (AttributeError, KeyError, IndexError)
"""What a check raises that takes a value for one of another type, as in `"structured_outputs": false`."""


def refuse_bodies(app: FastAPI) -> None:
    """Answer 400 where reading a body fails in such a way; the same errors from anywhere else stay 500s.

    Mutates: the app, before its first request.
    """
    for kind in _TRIPS:
        app.add_exception_handler(kind, _refused)
    app.middleware_stack = None  # made anew, should it have been made: it has its own copy of the handlers


async def _refused(request: Request, error: Exception) -> JSONResponse:
    names = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
    if "request_body_to_args" not in names:
        raise error
    message = f"the body can't be read: a value is not of the type that its name asks for ({error})"
    said: Any = create_error_response(message)
    return JSONResponse(said.model_dump(), status_code=400)
