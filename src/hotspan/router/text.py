"""What a request asks for, as far as routing goes: its prompt's pieces, by name, and how long it is.

    body -> messages -> chat template -> text -> bytes as tokens spell them -> pieces of 512 -> chained keys

The keys are the same ones that a replica's KV events lead to (blocks.py), as long as model, adapter and salt have the
same names there. A body that is odd, or that a template refuses, has fewer keys or none; it is never an error here.
"""

from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from hotspan.router.bodies import Prompt, prompt_of
from hotspan.router.roots import Roots
from hotspan.router.template import ChatTemplate, texts_of
from hotspan.router.tokens import TokenTable
from hotspan.router.types import PIECE_BYTES, Ask

ADAPTER_HEADER = "x-amzn-sagemaker-adapter-identifier"
SessionOf = Callable[[Mapping[str, str], Mapping[str, Any], str], bytes]

_BYTES_PER_TOKEN = 4.0
_LEAST, _MOST = 1.0, 16.0
"""What is not in between is not text alone: images, or a batch."""

_WEIGHT = 0.02
"""Of one answer in the means."""

_FRAME_BYTES = 64
"""What a template puts around a message, at most; for telling that a prompt is too short to have a piece."""


def piece_keys(text: bytes, root: int) -> list[int]:
    """The keys of a text's whole pieces, root first. 0.2 us a piece."""
    keys: list[int] = []
    for at in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        root = xxh3_64_intdigest(text[at : at + PIECE_BYTES], root)
        keys.append(root)
    return keys


class Prompts:
    """Turns the requests for one model into what routing needs to know of them.

    model:      a name for it in all keys. Its replicas' events are read with `roots`.
    names:      by which requests call it; any other that they call is an adapter. None: any is the model itself.
    template:   None joins messages in a form of its own, good for what this router itself dispatched.
    table:      None takes text as it is: exact KV state then only fits by luck.
    session_of: of headers with lower-case names, the body and what is configured; None knows no sessions.
    tenant_of:  whose a request is to the replicas, of its headers; None takes everybody for the default tenant.
    """

    def __init__(
        self,
        model: str = "",
        *,
        names: Sequence[str] | None = None,
        template: ChatTemplate | None = None,
        table: TokenTable | None = None,
        session_of: SessionOf | None = None,
        session_key: str = "",
        tenant_of: Callable[[Mapping[str, str]], str] | None = None,
    ) -> None:
        self.roots = Roots(model)
        self._names = None if names is None else frozenset(names)
        self._template, self._table = template, table
        self._session_of, self._session_key = session_of, session_key
        self._tenant_of = tenant_of
        self._bytes_per_token = _BYTES_PER_TOKEN
        self._answer_tokens = 0.0
        self.failed = 0

    @classmethod
    def load(cls, directory: Path, model: str = "", **options: Any) -> "Prompts":
        """Of a model's directory, with its template and its tokens. Raises: ConfigError."""
        return cls(model, template=ChatTemplate.load(directory), table=TokenTable.load(directory), **options)

    def ask(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any], *, tenant: str = "") -> Ask:
        """What a request is to routing. Never raises for what is in it. headers: with lower-case names."""
        try:
            prompt = prompt_of(path, body)
            text = self._bytes(prompt, body)
        except Exception:  # the body is a client's: anything can be in it, nested as deeply as it likes
            self.failed += 1
            prompt, text = Prompt(), None
        size = prompt.bytes if text is None else len(text)
        keys: list[int] = []
        if text is not None and len(text) >= PIECE_BYTES:
            keys = piece_keys(text, self._root(headers, body))
        per_token = self._bytes_per_token
        return Ask(
            keys=keys,
            tokens=max(len(prompt.ids) if prompt.ids else round(size / per_token), 1),
            piece_tokens=PIECE_BYTES / per_token,
            answer_tokens=self._answer(prompt),
            session=self._session_of(headers, body, self._session_key) if self._session_of else b"",
            tenant=tenant,
        )

    def learn(self, prompt_bytes: float, prompt_tokens: int, answer_tokens: int | None = None) -> None:
        """What an answer's usage says: how many tokens the prompt of so many bytes had, and how many were answered.

        prompt_bytes: of an Ask, `tokens * PIECE_BYTES / piece_tokens`.
        """
        if prompt_tokens > 0 and prompt_bytes >= PIECE_BYTES:
            seen = prompt_bytes / prompt_tokens
            if _LEAST <= seen <= _MOST:
                self._bytes_per_token += _WEIGHT * (seen - self._bytes_per_token)
        if answer_tokens is not None and answer_tokens >= 0:
            is_first = not self._answer_tokens
            self._answer_tokens += (1.0 if is_first else _WEIGHT) * (answer_tokens - self._answer_tokens)

    @property
    def bytes_per_token(self) -> float:
        """As learnt so far."""
        return self._bytes_per_token

    # -- inside ----------------------------------------------------------------------------------------------------

    def _bytes(self, prompt: Prompt, body: Mapping[str, Any]) -> bytes | None:
        """The prompt's bytes; None if it has no text, is too short for a piece, or a template refused it."""
        table = self._table
        if prompt.ids:
            return _joined(prompt.ids) if table is None else self._of_ids(prompt.ids, table)
        is_whole = body.get("add_special_tokens", prompt.messages is None) is not False
        if prompt.messages is None:
            text: str | None = prompt.text
        elif self._is_short(prompt):
            return None
        elif self._template is None:
            text = _plain(prompt)
        elif "chat_template" in body:
            return None
        else:
            text = self._template.render(prompt.messages, {**body, "tools": prompt.tools} if prompt.tools else body)
            self.failed += text is None
        if not text:
            return None
        return text.encode(errors="replace") if table is None else table.spell(text, is_whole=is_whole)

    def _is_short(self, prompt: Prompt) -> bool:
        frame = _FRAME_BYTES * len(prompt.messages or ()) + (self._template.overhead if self._template else 0)
        return not prompt.tools and prompt.bytes + frame < PIECE_BYTES

    def _of_ids(self, ids: Sequence[int], table: TokenTable) -> bytes | None:
        return table.join(ids) if min(ids) >= 0 else None

    def _adapter(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
        """By header, then `adapters`, then `model`, as replicas take it."""
        named: object = headers.get(ADAPTER_HEADER) or _in_any_case(headers, ADAPTER_HEADER)
        if not named:
            given = body.get("adapters")
            named = given[0] if isinstance(given, list) and given else given
        if not named and self._names is not None:
            named = body.get("model")
        return named if isinstance(named, str) and named not in (self._names or ()) else ""

    def _root(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> int:
        salt = body.get("cache_salt")
        tenant = self._tenant_of(headers) if self._tenant_of else ""
        return self.roots.of_request(self._adapter(headers, body), salt if isinstance(salt, str) else "", tenant)

    def _answer(self, prompt: Prompt) -> int:
        mean = round(self._answer_tokens)
        return min(mean, prompt.most_tokens) if prompt.most_tokens else mean


def _in_any_case(headers: Mapping[str, str], name: str) -> str:
    size = len(name)
    return next((value for key, value in headers.items() if len(key) == size and key.lower() == name), "")


def _joined(ids: Sequence[int]) -> bytes | None:
    try:
        return array("I", ids).tobytes()
    except (OverflowError, TypeError):
        return None


def _plain(prompt: Prompt) -> str:
    """Messages in a form of this router's own."""
    parts = [f"{prompt.tools}\x1d"] if prompt.tools else []
    for message in prompt.messages or ():
        texts, is_whole = texts_of(message.get("content"))
        parts.append(f"{message.get('role')}\x1f" + "\n".join(texts))
        if not is_whole:
            break
        calls = message.get("tool_calls")
        parts.append(f"{calls}\x1e" if calls else "\x1e")
    return "".join(parts)
