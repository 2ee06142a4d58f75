"""A session that is closed is forgotten: what was cached of it, before its end is acknowledged."""

from collections.abc import Awaitable, Callable
from typing import Any

from hotspan.http.errors import REQUEST, HttpError
from hotspan.server.admin import DURABLE_S, CacheAdmin


def forget_sessions(admin: CacheAdmin) -> Callable[[str, str], Awaitable[None]]:
    """A function that invalidates the chunks of a session, and its texts that are held for later."""

    async def forget(session: str, tenant: str) -> None:
        what: dict[str, Any] = {"session": session, "tags": [], "adapter": None, "model": False}
        try:
            receipts = await admin.withdraw({"do": "invalidate", "tenant": tenant} | what)
        except TimeoutError as error:
            message = f"the session is open: the engine did not forget it within {DURABLE_S:g} s: close it again"
            raise HttpError(503, message, about=REQUEST) from error
        except HttpError as error:
            raise HttpError(503, f"the session is open: {error}: close it again", about=REQUEST) from error
        if not all(receipt.get("is_durable") for receipt in receipts):
            message = "the session is open: what was cached of it might be found after a restart: close it again"
            raise HttpError(503, message, about=REQUEST)

    return forget
