"""Which session a request belongs to, and where sessions live.

Where one lives is computed from its name and the replicas' names, so that several routers agree without telling each
other; when a replica is lost, only its own sessions move. What is kept is a bounded table of exceptions.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from hotspan.core.errors import ConfigError

NEW_SESSION = "NEW_SESSION"
STATEFUL_HEADER = "x-amzn-sagemaker-session-id"
SESSION_HEADERS = (STATEFUL_HEADER, "x-session-id", "x-correlation-id")
SESSION_FIELDS = ("session_id", "prompt_cache_key")
FIRST_BYTES = 4096
"""Of a plain prompt's beginning, which stands for its system prompt and first message."""


def session_key(headers: Mapping[str, str], body: Mapping[str, Any], configured: str = "") -> bytes:
    """The name of a request's session, 16 bytes; empty if nothing in it could be one.

    headers:    with lower-case names.
    configured: a header or a field of the body that goes before all others.
    """
    found = _named(headers, body, configured) if configured else b""
    if found:
        return xxh3_128_digest(found)
    for name in SESSION_HEADERS:
        value = headers.get(name)
        if value and value != NEW_SESSION:
            return xxh3_128_digest(value.encode(errors="replace"))
    for name in SESSION_FIELDS:
        found = _field(body, name)
        if found:
            return xxh3_128_digest(found)
    return _beginning(body)


class Rendezvous:
    """Who of some replicas a session lives at: of those that are there, the one with the highest score.

    A replica of weight 2 gets twice the sessions of one with weight 1.
    """

    def __init__(self) -> None:
        self._seeds: dict[str, int] = {}
        self._weights: dict[str, float] = {}
        self._is_even = True

    def add(self, name: str, weight: float = 1.0) -> None:
        """Raises: ConfigError for a weight that is not above 0."""
        if not 0 < weight < math.inf:
            raise ConfigError(f"the weight of {name} is {weight}; give a number above 0")
        self._seeds[name] = xxh3_64_intdigest(name.encode())
        self._weights[name] = weight
        self._is_even = len(set(self._weights.values())) <= 1

    def remove(self, name: str) -> None:
        self._seeds.pop(name, None)
        self._weights.pop(name, None)
        self._is_even = len(set(self._weights.values())) <= 1

    def home(self, session: bytes, among: Iterable[str]) -> str | None:
        """Where it lives; None if there is nowhere."""
        seeds, weights = self._seeds, self._weights
        best, best_score = None, -math.inf
        for name in among:
            drawn: float = xxh3_64_intdigest(session, seeds[name])
            score = drawn if self._is_even else math.log((drawn + 0.5) / 2**64) / weights[name]
            if score > best_score or (score == best_score and best is not None and name < best):
                best, best_score = name, score
        return best


class Overrides:
    """Sessions that live elsewhere than they should; the longest unused go when there are too many."""

    def __init__(self, most: int = 65_536) -> None:
        if most < 0:
            raise ConfigError(f"a table of {most} sessions can't be; give 0 or more")
        self._most = most
        self._moved: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._moved)

    def get(self, session: bytes) -> str | None:
        """Where it lives instead."""
        name = self._moved.get(session)
        if name is not None:
            self._moved.move_to_end(session)
        return name

    def set(self, session: bytes, name: str) -> None:
        """From now on it lives there."""
        self._moved[session] = name
        self._moved.move_to_end(session)
        while len(self._moved) > self._most:
            self._moved.popitem(last=False)

    def drop(self, session: bytes) -> None:
        """It lives where it should again."""
        self._moved.pop(session, None)

    def drop_replica(self, name: str) -> None:
        """A replica is lost: those that moved there live where they should again."""
        for session in [session for session, where in self._moved.items() if where == name]:
            del self._moved[session]


def _named(headers: Mapping[str, str], body: Mapping[str, Any], name: str) -> bytes:
    """What a header or else a field of this name says."""
    value = headers.get(name.lower())
    return value.encode(errors="replace") if value and value != NEW_SESSION else _field(body, name)


def _field(body: Mapping[str, Any], name: str) -> bytes:
    value = body.get(name)
    if isinstance(value, str) and value != NEW_SESSION:
        return value.encode(errors="replace")
    return str(value).encode() if isinstance(value, int) and not isinstance(value, bool) else b""


def _beginning(body: Mapping[str, Any]) -> bytes:
    """Of the system prompt and the first message of a user, or of a plain prompt."""
    messages = body["messages"] if "messages" in body else _turns(body)
    if isinstance(messages, list):
        parts: list[bytes] = []
        for message in messages:
            if not isinstance(message, Mapping):
                continue
            role = message.get("role")
            if role in ("system", "developer", "user"):
                parts.append(str(role).encode() + b"\0" + _text(message.get("content")))
            if role == "user":
                break
        return xxh3_128_digest(b"\0\0".join(parts)) if parts else b""
    prompt = body.get("prompt", body.get("inputs"))
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    beginning = _text(prompt)
    return xxh3_128_digest(beginning[:FIRST_BYTES]) if beginning else b""


def _turns(body: Mapping[str, Any]) -> list[Any] | None:
    """What a request to /v1/responses has for messages."""
    given = body.get("input")
    if given is None:
        return None
    turns = given if isinstance(given, list) else [{"role": "user", "content": given}]
    return [{"role": "system", "content": body.get("instructions")}, *turns]


def _text(content: object) -> bytes:
    """A message's content, or a prompt: text, parts of text, or token ids."""
    if isinstance(content, str):
        return content.encode(errors="replace")
    if isinstance(content, list):
        if content and isinstance(content[0], int):
            return ",".join(map(str, content[:FIRST_BYTES])).encode()
        return b"\0".join(_part(part) for part in content)
    return b""


def _part(part: object) -> bytes:
    if isinstance(part, Mapping):
        text = part.get("text")
        return text.encode(errors="replace") if isinstance(text, str) else repr(sorted(map(str, part.items()))).encode()
    return str(part).encode(errors="replace")
