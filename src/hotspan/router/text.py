"""What routing needs to know of a request: the keys of its prompt's pieces, and its length.

    body -> messages -> chat template -> text -> bytes as tokens spell them -> pieces of 512 -> chained keys

The keys are the same ones that a replica's KV events lead to (blocks.py), as long as model, adapter and salt have the
same names there. A body that is odd, or that a template refuses, has fewer keys or none; it is never an error here.
"""

import logging
import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from hotspan.core.errors import ConfigError, UnsupportedModelError
from hotspan.core.namespace import ENGINE_SALT, engine_salt
from hotspan.core.terms import DEFAULT_TENANT
from hotspan.http.bodies import in_slices
from hotspan.http.head import ADAPTER_HEADER
from hotspan.http.json_size import JsonLimit, is_within
from hotspan.router.anthropic import merged
from hotspan.router.harmony import Harmony, is_harmony
from hotspan.router.prompt import MAX_NODES, MAX_TEXT, Prompt, check_options, path_of, prompt_of
from hotspan.router.sections import Section, sections_of, separator_pattern
from hotspan.router.session import session_key
from hotspan.router.template import ChatTemplate, texts_of
from hotspan.router.tokens import TokenTable
from hotspan.router.types import ANYBODY, PIECE_BYTES, Ask, Owner

logger = logging.getLogger(__name__)

MAX_READ = 1 << 23
"""Bytes of a body that is read here: what takes 20 ms of the event loop. Of a larger one its size counts alone."""

_PARSED = JsonLimit(containers=MAX_NODES, fields=4 * MAX_NODES)
"""What a body holds that is parsed: of more messages, tools and parts none would be read. The parser takes 30 ms."""

_ENGINE_NAME = re.compile(r"(?P<name>.+)@[0-9a-f]{12}")
_MAX_NAMES = 4096
_MAX_TENANTS = 1024
_tenant_salt = lru_cache(maxsize=_MAX_TENANTS)(engine_salt)
"""Of tenants, whom the operator names; what clients name is not kept."""

_UNSALTED = engine_salt(DEFAULT_TENANT)

_BYTES_PER_TOKEN = 4.0
_LEAST, _MOST = 1.0, 16.0
"""Range of bytes per token; outside of it the prompt is not text alone, but images or a batch."""

_WEIGHT = 0.02
"""Weight of one answer in the means."""

_FRAME_BYTES = 64
"""Maximum bytes that a template adds to a message; to see that a prompt is shorter than a piece."""


_MOST_BYTES = 4
"""Of a character; `Prompt.bytes` counts characters."""


def piece_keys(text: bytes, root: int) -> list[int]:
    """The keys of a text's whole pieces, root first. 0.2 us a piece."""
    keys: list[int] = []
    for at in range(0, len(text) - PIECE_BYTES + 1, PIECE_BYTES):
        root = xxh3_64_intdigest(text[at : at + PIECE_BYTES], root)
        keys.append(root)
    return keys


class Roots:
    """What the keys of texts are chained from: adapter and salt, as a request names them and as an engine does.

    hotspan's replicas give the engine names of their own: an adapter's with a digest of its content, and a salt for
    each tenant. What events show of these is used for requests too, so that both lead to the same keys.

    is_salted: replicas have shown salts of hotspan's, so requests are counted as having them.
    secret:    64 bits, which nobody who writes texts may know: xxh3 alone does not keep names apart on purpose.
    """

    def __init__(self, secret: int = 0) -> None:
        self._secret = secret
        self._adapters: dict[str, str] = {}
        self.is_salted = False

    def of_engine(self, adapter: str, salt: str) -> int | None:
        """The root of a text whose adapter and salt an engine names."""
        found = _ENGINE_NAME.fullmatch(adapter)
        if found and (found["name"] in self._adapters or len(self._adapters) < _MAX_NAMES):
            self._adapters[found["name"]] = adapter
        self.is_salted = self.is_salted or salt.startswith(ENGINE_SALT)
        return self._root(adapter, "" if salt == _UNSALTED else salt)

    def of_request(self, adapter: str, salt: str, owner: Owner = ANYBODY) -> int:
        """The root of a text that a request asks for; no two owners have one.

        It is that of the replicas' events for an owner whose tenant is known, and for a client that shows nothing.
        """
        tenant, mark = owner.tenant or DEFAULT_TENANT, owner.mark
        if self.is_salted and (owner.tenant or not mark):
            mark = b""
            if salt:
                salt = engine_salt(tenant, salt)
            elif tenant != DEFAULT_TENANT:
                salt = _tenant_salt(tenant)
        return self._root(self._adapters.get(adapter, adapter), salt, mark)

    def _root(self, adapter: str, salt: str, mark: bytes = b"") -> int:
        data = f"{adapter}\0{salt}".encode(errors="replace")
        return xxh3_64_intdigest(data + b"\0" + mark if mark else data, self._secret)


class Prompts:
    """Turns the requests for one model into what routing needs to know of them.

    roots:           what its replicas' events are read with.
    names:           by which requests call it; any other that they call is an adapter. None: any is the model itself.
    template:        None joins messages in a form of its own, good for what this router itself dispatched.
    table:           None takes text as it is: exact KV state then only fits by luck.
    session_key:     a header or field of the body that names the session, before all others.
    owner_of:        whose texts a request's are, by its headers; None takes everybody for one owner.
    secret:          as `Roots` has it.
    separators:      texts between the documents of prompts, whose sections are compared, too, wherever they stand.
    bytes_per_token: of prompts, as learnt so far.
    unread, failed:  bodies that are no JSON object; odd ones, and chats that the template refused.
    """

    def __init__(
        self,
        *,
        names: Sequence[str] | None = None,
        template: ChatTemplate | Harmony | None = None,
        table: TokenTable | None = None,
        session_key: str = "",
        owner_of: Callable[[Mapping[str, str]], Owner] = lambda headers: ANYBODY,
        separators: Sequence[str] = (),
        secret: int = 0,
    ) -> None:
        self.roots = Roots(secret)
        self._names = None if names is None else frozenset(names)
        self._template, self._table = template, table
        self._session_key = session_key
        self._owner_of = owner_of
        self._separators = separator_pattern(separators)
        self.bytes_per_token = _BYTES_PER_TOKEN
        self._answer_tokens = 0.0
        self.unread = self.failed = 0

    @classmethod
    def load(cls, directory: Path, *, needs_tokens: bool = True, **options: Any) -> "Prompts":
        """Of a model's directory, with its template and its tokens. Raises: ConfigError for one that can't be read.

        A template or a tokenizer that can't be followed is done without: prompts are compared with those before them,
        and what events say of a replica is found not to match (`matching.py`).
        needs_tokens: if not, a directory without readable tokens will do: prompts of token ids are not compared.
        """
        template: ChatTemplate | Harmony | None = None
        table = None
        try:
            template = Harmony() if is_harmony(directory) else ChatTemplate.load(directory)
        except UnsupportedModelError as error:
            logger.warning("template_not_followed error=%s: chats are compared with those that were sent before", error)
        try:
            table = TokenTable.load(directory)
        except ConfigError as error:
            if needs_tokens and not isinstance(error, UnsupportedModelError):
                raise
            logger.warning("tokens_not_followed error=%s: KV events and prompts of token ids are not compared", error)
        return cls(template=template, table=table, **options)

    async def read(
        self, path: str, headers: Mapping[str, str], body: bytes, *, tenant: str = "", request_id: str = ""
    ) -> Ask:
        """The same as `ask` for a body as it came; of one that is no JSON object, or holds more than a chat that is
        compared, its size counts alone. What it holds is counted once, with pauses for the event loop's other work.

        path:       "" if it is not known: the fields of the body tell its schema then.
        request_id: for the log.
        """
        try:
            is_read = len(body) <= MAX_READ and body[:16].lstrip().startswith(b"{")
            parsed = orjson.loads(body) if is_read and await in_slices(is_within(body, _PARSED)) else None
            if isinstance(parsed, dict):
                return self.ask(path or path_of(parsed), headers, parsed, tenant=tenant, body_bytes=len(body))
        except orjson.JSONDecodeError:
            pass  # the replica says what is wrong with it
        except Exception:  # a prompt is the client's to write: whatever it is, a replica answers it
            logger.warning("prompt_unread request=%s path=%s", request_id, path, exc_info=True)
        self.unread += 1
        owner = self._owner_of(headers).mark
        session = session_key(headers, {}, Prompt(), self._session_key, owner)
        return Ask((), int(len(body) / _BYTES_PER_TOKEN), 1.0, session=session, tenant=tenant, owner=owner)

    def ask(
        self, path: str, headers: Mapping[str, str], body: Mapping[str, Any], *, tenant: str = "", body_bytes: int = 0
    ) -> Ask:
        """What routing needs to know of a request. Never raises for what is in it.

        headers:    with lower-case names.
        body_bytes: what counts as the length of a prompt that is not read.
        """
        session, owner = b"", self._owner_of(headers)
        try:
            prompt = prompt_of(path, body)
            session = session_key(headers, body, prompt, self._session_key, owner.mark)
            text = self._bytes(prompt, body)
        except Exception:  # the body is a client's: anything can be in it, nested as deeply as it likes
            self.failed += 1
            prompt, text = Prompt(bytes=body_bytes), None
            session = session or session_key(headers, {}, prompt, self._session_key, owner.mark)
        is_cut = text is None or 2 * len(text) < prompt.bytes
        size = prompt.others + (prompt.bytes if text is None or is_cut else len(text))
        continued = body.get("previous_response_id") if path.endswith("/responses") else None
        keys: list[int] = []
        sections: list[Section] = []
        if text is not None and len(text) >= PIECE_BYTES:
            root = self._root(headers, body, owner)
            keys = piece_keys(text, root)
            if self._separators is not None:
                sections = sections_of(text, root, self._separators)
        per_token = self.bytes_per_token
        return Ask(
            keys=keys,
            tokens=max(len(prompt.ids) + round(prompt.others / 4) if prompt.ids else round(size / per_token), 1),
            piece_tokens=PIECE_BYTES / per_token,
            answer_tokens=self._answer(prompt),
            session=session,
            tenant=tenant,
            owner=owner.mark,
            response=continued if isinstance(continued, str) else "",
            sections=sections,
            model=model if isinstance(model := body.get("model"), str) else "",
            adapter=_own_adapter(headers, body),
        )

    def learn(self, prompt_bytes: float, prompt_tokens: int, answer_tokens: int | None = None) -> None:
        """Take over the usage of an answer: the tokens of its prompt, which has so many bytes, and of the answer.

        prompt_bytes: of an Ask, `tokens * PIECE_BYTES / piece_tokens`.
        """
        if prompt_tokens > 0 and prompt_bytes >= PIECE_BYTES:
            seen = prompt_bytes / prompt_tokens
            if _LEAST <= seen <= _MOST:
                self.bytes_per_token += _WEIGHT * (seen - self.bytes_per_token)
        if answer_tokens is not None and answer_tokens >= 0:
            is_first = not self._answer_tokens
            self._answer_tokens += (1.0 if is_first else _WEIGHT) * (answer_tokens - self._answer_tokens)

    def join(self, ids: Sequence[int]) -> bytes | None:
        """The bytes of tokens, as `TokenTable.join`; without a table, those of their ids."""
        if self._table is not None:
            return self._table.join(ids)
        try:
            return array("I", ids).tobytes()
        except (OverflowError, TypeError):
            return None

    # -- inside ----------------------------------------------------------------------------------------------------

    def _bytes(self, prompt: Prompt, body: Mapping[str, Any]) -> bytes | None:
        """The prompt's bytes; None if it has no text, is too short for a piece, or a template refused it."""
        table = self._table
        if prompt.ids:
            ids = prompt.ids[: MAX_TEXT // 4]
            return self.join(ids) if min(ids) >= 0 else None
        is_whole = body.get("add_special_tokens", prompt.messages is None) is not False
        if prompt.messages is None:
            text: str | None = prompt.text[:MAX_TEXT]
        elif self._is_short(prompt, body.get("documents")):
            return None
        elif self._template is None:
            text = _plain(prompt)
        elif "chat_template" in body:
            return None
        else:
            check_options(body)
            asked = {**body, **prompt.options, "tools": prompt.tools} if prompt.tools or prompt.options else body
            text = self._template.render(prompt.messages, asked)
            if text is None and any(message.get("role") == "system" for message in prompt.messages[1:]):
                text = self._template.render(merged(prompt.messages), asked)
            self.failed += text is None
        if not text:
            return None
        return text.encode(errors="replace") if table is None else table.spell(text, is_whole=is_whole)

    def _is_short(self, prompt: Prompt, documents: object) -> bool:
        frame = _FRAME_BYTES * len(prompt.messages or ()) + (self._template.overhead if self._template else 0)
        return not prompt.tools and not documents and _MOST_BYTES * prompt.bytes + frame < PIECE_BYTES

    def _adapter(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
        """By header, then `adapters`, then `model`, as replicas take it."""
        named: object = _own_adapter(headers, body)
        if not named and self._names is not None:
            named = body.get("model")
        return named if isinstance(named, str) and named not in (self._names or ()) else ""

    def _root(self, headers: Mapping[str, str], body: Mapping[str, Any], owner: Owner) -> int:
        salt = body.get("cache_salt")
        return self.roots.of_request(self._adapter(headers, body), salt if isinstance(salt, str) else "", owner)

    def _answer(self, prompt: Prompt) -> int:
        mean = round(self._answer_tokens)
        return min(mean, prompt.max_tokens) if prompt.max_tokens else mean


def _own_adapter(headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
    """The adapter that is named apart from the model; "" if none is."""
    named: object = headers.get(ADAPTER_HEADER) or _in_any_case(headers, ADAPTER_HEADER)
    if not named:
        given = body.get("adapters")
        named = given[0] if isinstance(given, list) and given else given
    return named if isinstance(named, str) else ""


def _in_any_case(headers: Mapping[str, str], name: str) -> str:
    size = len(name)
    return next((value for key, value in headers.items() if len(key) == size and key.lower() == name), "")


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
