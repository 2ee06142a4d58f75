"""What a client asks to be computed: the body of POST /hotspan/cache/warm."""

import json
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hotspan.core.directives import parse_directives
from hotspan.core.errors import ConfigError
from hotspan.http.errors import HttpError
from hotspan.http.warming import Warmup, around, warmup

MAX_TEXTS = 1000
_MAX_TEMPLATE = 1 << 16
"""Characters of a template, which becomes part of each text."""

_LEAST_CHARS = 1024
"""That each text counts with beside its characters and those of its tags, for its name and what holds them."""

Json = dict[str, Any]


class WarmText(BaseModel):
    """One text: exactly one of `text`, `prompt` and `messages`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, max_length=512, description="For the result. Default: its number, from 1 on.")
    text: str | None = Field(None, description="A document, which goes into the template.")
    prompt: str | None = Field(None, description="A prompt of /v1/completions.")
    messages: list[Json] | None = Field(None, min_length=1, description="Messages of /v1/chat/completions.")
    tags: list[str] = Field([], max_length=64, description="Its own tags, beside those of all texts.")
    session: str | None = Field(None, description="The id of a session.")


class WarmRequest(BaseModel):
    """Texts to compute."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: list[WarmText] = Field(min_length=1, max_length=MAX_TEXTS, description="The texts, in their order.")
    template: str | None = Field(
        None,
        max_length=_MAX_TEMPLATE,
        description="The prompt of a document: {document} stands for it; what comes from {question} on is left out.",
    )
    tags: list[str] = Field([], max_length=64, description="Tags of all texts.")
    ttl: str | int | None = Field(None, description="Time to live, such as 12h or 7d. Default: until it is evicted.")
    model: str | None = Field(None, max_length=512, description="The model or the adapter. Default: the model.")
    tenant: str | None = Field(
        None, min_length=1, max_length=512, description="The tenant; for a client with an API key, its own."
    )

    def chars(self) -> list[int]:
        """Characters of each text as it will be held, counted before any is made."""
        template = len(self.template or "")
        return [
            len(text.text or "")
            + (template if text.text is not None else 0)
            + len(text.prompt or "")
            + (len(json.dumps(text.messages)) if text.messages else 0)
            + sum(map(len, text.tags))
            + _LEAST_CHARS
            for text in self.texts
        ]

    def warmups(self) -> list[Warmup]:
        """The requests. Raises: HttpError 400."""
        try:
            head, _ = around(self.template)
        except ConfigError as error:
            raise HttpError(400, str(error)) from error
        found = []
        for number, text in enumerate(self.texts, 1):
            name = text.name or str(number)
            try:
                each = warmup(text.model_dump(exclude_none=True), name, self.template, self.tags)
                parse_directives(each.directives | self.directives)
            except ValueError as error:
                raise HttpError(400, f"text {name}: {error}") from error
            found.append(replace(each, head=head) if each.head else each)  # one text, not one for each
        return found

    @property
    def directives(self) -> Json:
        """Those of every text's request."""
        return {} if self.ttl is None else {"ttl": self.ttl}
