"""What other parts of a server plug into its HTTP contract."""

from collections.abc import Mapping
from typing import Any, Protocol

Payload = dict[str, Any]


class Adapters(Protocol):
    """The adapters that requests may name."""

    def key_of(self, name: str, owner: str) -> str:
        """What the server calls the adapter that a request of `owner` names. Raises: as `resolve`."""
        ...

    async def resolve(self, key: str) -> str:
        """The engine's model name of this adapter, ready to be used.

        Blocks:  while its weights load.
        Raises:  HttpError, or a HotspanError with a `status`, where there is none or it can't be loaded.
        """
        ...


class Formatters(Protocol):
    """The user's own formatters.

    adapter: by the server's name; None for the base model. headers: the request's, `x-request-id` among them.
    """

    @property
    def is_empty(self) -> bool:
        """Whether nothing is formatted, neither for the base model nor for any adapter."""
        ...

    def has_input(self, adapter: str | None) -> bool: ...

    def has_output(self, adapter: str | None) -> bool: ...

    async def input(self, adapter: str | None, payload: Payload, headers: Mapping[str, str]) -> Payload:
        """The request that the formatter makes of a request. Raises: FormatterError."""
        ...

    async def output(
        self, adapter: str | None, output: Payload | str | bytes, headers: Mapping[str, str]
    ) -> Payload | str | bytes:
        """What the formatter makes of an answer, or of one chunk of a stream. Raises: FormatterError."""
        ...


class Forget(Protocol):
    """Where a closed session is told to, to invalidate what the cache holds of it."""

    async def __call__(self, session: str, tenant: str) -> None: ...
