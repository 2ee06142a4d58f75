"""The one error of HTTP, in the shape of OpenAI's: {"error": {"message", "type", "param", "code"}}."""

import json
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from hotspan.core.errors import HotspanError

RETRY_S = 5
"""Seconds of Retry-After where nothing better is known."""

_RETRIED_LATER = frozenset({429, 503})
"""Statuses that always have Retry-After."""

REFUSED = "x-hotspan-refused"
"""The header of a refusal that tells nothing of the server's health: what the refusal is about. A router reads it in
the responses of its replicas, whatever status these have (LMI's clients get 503 for 429)."""

LIMIT, MODEL, REQUEST = "limit", "model", "request"
"""Values of REFUSED: the requests in work are as many as may be; the model or adapter that the request names; what this
one request asked for, while others are served."""


class HttpError(HotspanError):
    """A request that is refused; the message says what happened, to what, and what to do next.

    param:   the part of the request that is wrong.
    retry_s: seconds of Retry-After; 429 and 503 always have one.
    code:    a word for programs, such as invalid_api_key; without one the status.
    kind:    the error's type; without one it is made of the status.
    about:   LIMIT, MODEL or REQUEST for a refusal that says nothing of the server's health; 429 is about a LIMIT.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        retry_s: int | None = None,
        code: str | None = None,
        kind: str | None = None,
        about: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.refused = about or (LIMIT if status == HTTPStatus.TOO_MANY_REQUESTS else "")
        self.retry_s = RETRY_S if retry_s is None and status in _RETRIED_LATER else retry_s
        self._body: dict[str, Any] = {}
        kind = kind or error_type(status)
        self._error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code or status}

    @classmethod
    def of(cls, error: HotspanError) -> "HttpError":
        """Any error of hotspan as one for a client, with its own `status` if it has one."""
        if isinstance(error, HttpError):
            return error
        return cls(
            getattr(error, "status", 500), str(error), kind=type(error).__name__, about=getattr(error, "about", "")
        )

    @classmethod
    def answered(cls, status: int, body: bytes, *, about: str = "") -> "HttpError":
        """An error that another application answered, in whatever shape; its further fields are kept."""
        try:
            said = json.loads(body)
        except ValueError:
            said = body.decode(errors="replace").strip()
        inner = said.get("error", said.get("detail")) if isinstance(said, dict) else said
        if not isinstance(inner, dict):
            return cls(status, str(inner or HTTPStatus(status).phrase), about=about)
        made = cls(status, str(inner.get("message", "")), about=about)
        made._body = said
        made._error |= {name: value for name, value in inner.items() if value is not None}
        return made

    @classmethod
    def in_stream(cls, event: Mapping[str, Any]) -> "HttpError":
        """The error that an event of a stream of vLLM's carries."""
        said = event["error"]
        code = said.get("code") if isinstance(said, dict) else None
        return cls.answered(code if isinstance(code, int) else 500, json.dumps(event).encode())

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
        """Headers of the response besides those of its body."""
        found = {} if self.retry_s is None else {"retry-after": str(self.retry_s)}
        if self.refused:
            found[REFUSED] = self.refused
        if self.status == HTTPStatus.UNAUTHORIZED:
            found["www-authenticate"] = 'Bearer realm="hotspan"'
        return found

    def body(self, status: int | None = None) -> dict[str, Any]:
        """The JSON of the response, which has this `status`. A code that is a word stays as it is."""
        code = self._error["code"]
        code = status if isinstance(code, int) and status is not None else code
        return {**self._body, "error": {**self._error, "code": code}}

    def content(self, status: int | None = None) -> bytes:
        """The same as bytes."""
        return json.dumps(self.body(status)).encode()


def error_type(status: int) -> str:
    """The type of an error by its status, as OpenAI and vLLM name them."""
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return "RateLimitError"
    phrase = HTTPStatus(status).phrase.replace(" ", "").replace("-", "")
    return phrase if phrase.endswith("Error") else f"{phrase}Error"
