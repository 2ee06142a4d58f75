"""The one shape of an error over HTTP, and where LMI's statuses differ from it."""

import json
from http import HTTPStatus
from typing import Any

from hotspan.core.errors import HotspanError

RETRY_S = 5
"""After which to try again, where nobody knows better."""

FAILED_DEPENDENCY = 424
_SAYS_WHEN = frozenset({429, 503})
"""Statuses that go out with Retry-After, always."""

_LMI_HAS_IT_TOO = frozenset({401, 403, 405, 408, 413, 503, 504})
"""Statuses that LMI's front end gives itself, before or around the model; all others become 424."""


class HttpError(HotspanError):
    """A request that can't be answered; the message says what happened, to what, and what to do next.

    param:   the part of the request that is wrong.
    retry_s: after how many seconds to try again; with 429 and 503 there always is one.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_s = RETRY_S if retry_s is None and status in _SAYS_WHEN else retry_s
        self._body: dict[str, Any] = {}
        self._error: dict[str, Any] = {"message": message, "type": error_type(status), "param": param, "code": status}

    @classmethod
    def of(cls, error: HotspanError) -> "HttpError":
        """Any error of hotspan's as one for a client: with its own `status` if it has one."""
        if isinstance(error, cls):
            return error
        made = cls(getattr(error, "status", 500), str(error))
        made._error["type"] = type(error).__name__
        return made

    @classmethod
    def answered(cls, status: int, body: bytes) -> "HttpError":
        """What another application answered, whatever shape it has; what else it said is kept."""
        try:
            said = json.loads(body)
        except ValueError:
            said = body.decode(errors="replace").strip()
        inner = said.get("error", said.get("detail")) if isinstance(said, dict) else said
        if not isinstance(inner, dict):
            return cls(status, str(inner or HTTPStatus(status).phrase))
        made = cls(status, str(inner.get("message", "")))
        made._body = said
        made._error |= {name: value for name, value in inner.items() if value is not None}
        return made

    @property
    def param(self) -> Any:
        """The part of the request that is wrong."""
        return self._error["param"]

    def about(self, param: Any) -> "HttpError":
        """The same error, about another name for what is wrong."""
        self._error["param"] = param
        return self

    @property
    def headers(self) -> dict[str, str]:
        """What is said of it besides its body."""
        return {} if self.retry_s is None else {"retry-after": str(self.retry_s)}

    def body(self, status: int) -> dict[str, Any]:
        """The JSON of it, answered with `status`. A code that is a word (invalid_api_key) stays as it is."""
        code = self._error["code"]
        return {**self._body, "error": {**self._error, "code": status if isinstance(code, int) else code}}


def error_type(status: int) -> str:
    """An error's type, by its status, as OpenAI's and the engine's are called."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "RateLimitError"
    phrase = HTTPStatus(status).phrase.replace(" ", "").replace("-", "")
    return phrase if phrase.endswith("Error") else f"{phrase}Error"


def lmi_status(status: int) -> int:
    """What LMI answers where the true status is `status`."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return HTTPStatus.SERVICE_UNAVAILABLE.value
    return status if status < 400 or status in _LMI_HAS_IT_TOO else FAILED_DEPENDENCY
