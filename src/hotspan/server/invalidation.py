"""What a request invalidates: one scope, or a batch of them."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from hotspan.core.directives import parse_directives
from hotspan.http.errors import HttpError

_MAX_ID = 2**31
_MAX_IN_BATCH = 1000
_MAX_NAMES = 4096
"""Tags and sessions in all of a batch."""

_MAX_TOKENS = 1 << 22
"""Above any model's context. Longer lists are refused while the body is parsed."""

TokenId = Annotated[int, Field(ge=0, lt=_MAX_ID)]
Name = Annotated[str, Field(min_length=1, max_length=512)]


class Invalidation(BaseModel):
    """What to invalidate: all that matches every given field, and all that was computed on top of it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tenant: Name | None = Field(None, description="The tenant; for a client with an API key, its own.")
    tags: list[str] = Field([], max_length=64, description="Tags; chunks that carry all of them are removed.")
    session: str | None = Field(None, description="The id of a session.")
    adapter: Name | None = Field(None, description="The name of an adapter.")
    model: bool = Field(False, description="Only what belongs to the model that is served.")
    tokens: list[TokenId] | None = Field(
        None, max_length=_MAX_TOKENS, description="A text as token ids, at most as long as the model's context."
    )
    prompt: str | None = Field(None, description="A text, tokenised as /v1/completions does.")
    tokens_from: TokenId | None = Field(
        None, description="The first token to invalidate; the text before it stays cached."
    )
    cache_salt: str | None = Field(None, max_length=4096, description="The cache_salt of the requests with this text.")

    @property
    def names_text(self) -> bool:
        """Whether it names a text."""
        return self.tokens is not None or self.prompt is not None

    @property
    def is_empty(self) -> bool:
        """Whether no field is given."""
        return not (self.tenant or self.tags or self.session or self.adapter or self.model or self.names_text)


class Invalidations(Invalidation):
    """What to invalidate: one scope, or a batch of scopes with one receipt."""

    batch: list[Invalidation] = Field(
        [],
        max_length=_MAX_IN_BATCH,
        description="Invalidations to carry out together. Besides, only `tenant` may be given, for those without one.",
    )

    @property
    def each(self) -> list[Invalidation]:
        """The invalidations, one by one."""
        if not self.batch:
            return [self]
        return [each if each.tenant else each.model_copy(update={"tenant": self.tenant}) for each in self.batch]


def check_batch(asked: Invalidations) -> None:
    """Raise HttpError 400 for a batch that is too large, or has more than a tenant beside it."""
    if asked.batch and not asked.model_copy(update={"tenant": None}).is_empty:
        raise HttpError(400, "beside a batch only its tenant may be given: write the rest into the batch")
    names = sum(len(each.tags) + (each.session is not None) for each in asked.each)
    if names > _MAX_NAMES:
        raise HttpError(400, f"the batch names {names} tags and sessions: give at most {_MAX_NAMES} at a time")


def check_scope(asked: Invalidation) -> None:
    """Raise HttpError 400 for fields that do not go together, or tags and a session that can't be."""
    if asked.tokens is not None and asked.prompt is not None:
        raise HttpError(400, "both tokens and prompt name a text: give one of them")
    if not asked.names_text and (asked.tokens_from is not None or asked.cache_salt is not None):
        raise HttpError(400, "tokens_from and cache_salt belong to a text: give tokens or prompt with them")
    try:
        parse_directives({"tags": asked.tags, "session": asked.session})
    except ValueError as error:
        raise HttpError(400, str(error)) from error
