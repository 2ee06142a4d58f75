"""What clients say of requests to come: what is brought into RAM before, and what is evicted last."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hotspan.core.directives import parse_directives
from hotspan.core.terms import DEFAULT_TENANT
from hotspan.core.types import GIB
from hotspan.http.errors import HttpError
from hotspan.server.administered import Administered
from hotspan.server.principal import Principal

_MAX_TOKENS = 1 << 22
_MAX_HOLD_S = 600.0
_MAX_PIN_S = 30 * 86400.0
_CHAT = ("messages", "tools", "chat_template", "chat_template_kwargs", "add_generation_prompt")

Json = dict[str, Any]


class Announcement(BaseModel):
    """What is about to be asked: exactly one of `prompt`, `messages`, `session` and `tags`.

    The body of the request itself will do: fields that have no part in its prompt are ignored.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    prompt: str | list[int] | None = Field(
        None, max_length=_MAX_TOKENS, description="A prompt of /v1/completions: a text, or token ids."
    )
    messages: list[Json] | None = Field(None, min_length=1, description="Messages of /v1/chat/completions.")
    tools: list[Json] | None = Field(None, description="With messages: as in the request.")
    chat_template: str | None = Field(None, description="With messages: as in the request.")
    chat_template_kwargs: Json | None = Field(None, description="With messages: as in the request.")
    add_generation_prompt: bool | None = Field(None, description="With messages: as in the request.")
    model: str | None = Field(None, max_length=512, description="The model or the adapter of the request.")
    cache_salt: str | None = Field(None, max_length=4096, description="The cache_salt of the request.")
    session: str | None = Field(None, description="The id of a session: what its requests left on disk.")
    tags: list[str] = Field([], max_length=64, description="Tags: what is on disk and carries all of them.")
    tenant: str | None = Field(
        None, min_length=1, max_length=512, description="The tenant; for a client with an API key, its own."
    )
    hold_s: float = Field(
        30.0, ge=1.0, le=_MAX_HOLD_S, description="How long it is held in RAM for the request, in seconds."
    )


class Pinning(BaseModel):
    """Which chunks are evicted last, how many bytes of them, and for how long."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tags: list[str] = Field(min_length=1, max_length=64, description="Tags: what carries all of them is evicted last.")
    gib: float = Field(
        ge=0.0, le=1 << 30, description="At most so many GiB of it in each tier; 0 ends the pin of these tags."
    )
    hold_s: float = Field(3600.0, ge=1.0, le=_MAX_PIN_S, description="For how long, in seconds.")
    tenant: str | None = Field(
        None, min_length=1, max_length=512, description="The tenant; for a client with an API key, its own."
    )


def pin_of(asked: Pinning, owner: str) -> Json:
    """The engine's command. Raises: HttpError 400."""
    try:
        parse_directives({"tags": asked.tags})
    except ValueError as error:
        raise HttpError(400, str(error)) from error
    return {
        "do": "pin",
        "tenant": owner,
        "tags": asked.tags,
        "bytes": int(asked.gib * GIB),
        "hold_s": asked.hold_s,
    }


def owner_of(principal: Principal, tenant: str | None) -> str:
    """The tenant whose chunks an announcement may name. Raises: HttpError 403 for another's."""
    if principal.is_admin:
        return tenant or DEFAULT_TENANT
    if tenant not in (None, principal.tenant):
        raise HttpError(403, f"this key belongs to another tenant than {tenant!r}: leave tenant out")
    return principal.tenant


async def command_of(asked: Announcement, engine: Administered, owner: str) -> Json:
    """The engine's command. Raises: HttpError 400."""
    named = [asked.prompt is not None, asked.messages is not None, asked.session is not None, bool(asked.tags)]
    if sum(named) != 1:
        raise HttpError(400, "give one of prompt, messages, session and tags")
    command: Json = {"do": "prefetch", "tenant": owner, "hold_s": asked.hold_s}
    if asked.prompt is None and asked.messages is None:
        try:
            parse_directives({"tags": asked.tags, "session": asked.session})
        except ValueError as error:
            raise HttpError(400, str(error)) from error
        return command | {"tags": asked.tags, "session": asked.session}
    tokens = await _tokens(asked, engine)
    if len(tokens) > engine.max_tokens:
        raise HttpError(400, f"the prompt has {len(tokens)} tokens, and this model takes {engine.max_tokens}")
    return command | {"tokens": tokens, "cache_salt": engine.salt(owner, asked.cache_salt)}


async def _tokens(asked: Announcement, engine: Administered) -> list[int]:
    try:
        if asked.messages is not None:
            return await engine.chat_tokens(asked.model_dump(include=set(_CHAT), exclude_none=True))
        if isinstance(asked.prompt, list):
            if any(token < 0 or token >= 1 << 31 for token in asked.prompt):
                raise HttpError(400, "token ids are whole numbers from 0 on")
            return asked.prompt
        return await engine.tokens(asked.prompt or "")
    except ValueError as error:
        raise HttpError(400, str(error)) from error
