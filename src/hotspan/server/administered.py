"""What the administration of a cache asks of an engine, whoever serves it."""

from collections.abc import Mapping, Set
from typing import Any, Protocol


class Administered(Protocol):
    """An engine, with the names of its base model."""

    @property
    def names(self) -> Set[str]:
        """What the base model is called."""

    @property
    def max_tokens(self) -> int:
        """How many tokens a request may have in all."""

    @property
    def max_chars(self) -> int:
        """How many characters such a prompt may have."""

    async def administer(self, command: Mapping[str, Any], timeout_s: float | None = None) -> list[dict[str, Any]]:
        """Carry out one command (engine/admin.py); the answer of each engine core.

        Raises: TimeoutError; what was begun goes on. EngineError with what the engine said.
        """

    def salt(self, tenant: str, salt: str | None) -> str | None:
        """What the engine salts a tenant's prefixes with, given the client's own salt."""

    async def trace(self, recording: str, block_tokens: int, *, is_last: bool) -> dict[str, Any] | None:
        """The requests since the last call, without their text; None if somebody else records.

        The last answer has the engine in `server`, and in `engines` how many cores it has. Raises: HttpError.
        """

    async def tokens(self, prompt: str) -> list[int]:
        """A text's tokens, as /v1/completions makes them. Raises: ValueError for one that no request may have."""

    async def chat_tokens(self, body: Mapping[str, Any]) -> list[int]:
        """The tokens of a chat, as /v1/chat/completions makes them of the same fields. Raises: ValueError."""

    def adapter_path(self, name: str) -> str | None:
        """Where the files of a registered adapter are; None if there is no such adapter."""
