"""Sessions: the one that a request belongs to, the replica or group where it lives, and those that one replica keeps.

Where a session lives is computed from names (rendezvous hashing), so that several routers agree without telling each
other; when a replica is lost, only its own sessions move. What is kept are bounded tables of exceptions.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, TypeVar

from xxhash import xxh3_64_intdigest, xxh3_128_digest

from hotspan.core.clock import Clock
from hotspan.http.head import SESSION_HEADER
from hotspan.router.parted import Parted
from hotspan.router.prompt import Prompt, flat

K = TypeVar("K")
V = TypeVar("V")

NEW_SESSION = "NEW_SESSION"
MAX_SESSIONS = 65_536
"""Entries of each table."""

REST = ""
"""The replicas of all groups without a share, as one group."""

_HEADERS = (SESSION_HEADER, "x-session-id", "x-correlation-id")
_FIELDS = ("session_id", "prompt_cache_key")
_FIRST_BYTES = 4096
"""Of a plain prompt's beginning, which stands for its system prompt and first message."""

_GROUP = "group "
"""Prefix of groups, so that a group with the name of a replica does not draw that replica's numbers."""

_LASTS_S = 1200.0

_MAX_ID = 256


# -- which session -----------------------------------------------------------------------------------------------------


def session_key(
    headers: Mapping[str, str], body: Mapping[str, Any], prompt: Prompt, configured: str = "", owner: bytes = b""
) -> bytes:
    """The name of a request's session, 16 bytes; empty if the request names none and has no prompt.

    headers:    with lower-case names.
    configured: a header or a field of the body that takes precedence over all others.
    owner:      the mark of whose it is: two owners' sessions have nothing in common.
    """
    found = _given(headers.get(configured.lower())) or _given(body.get(configured)) if configured else b""
    for fields, names in ((headers, _HEADERS), (body, _FIELDS)):
        for name in names:
            if not found and name in fields:
                found = _given(fields[name])
    found = found or _beginning(prompt)
    return xxh3_128_digest(owner + found) if found else b""


def _given(value: object) -> bytes:
    if isinstance(value, str) and value != NEW_SESSION:
        return value.encode(errors="replace")
    return str(value).encode() if isinstance(value, int) and not isinstance(value, bool) else b""


def _beginning(prompt: Prompt) -> bytes:
    """The system prompt and the first message of a user, or the first bytes of a plain prompt."""
    if prompt.messages is None:
        return (prompt.text or ",".join(map(str, prompt.ids[:_FIRST_BYTES]))).encode(errors="replace")[:_FIRST_BYTES]
    parts = []
    for message in prompt.messages:
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer", "user"):
            parts.append(f"{role}\0{content if isinstance(content, str) else _strings(content)}")
        if role == "user":
            break
    return "\0\0".join(parts).encode(errors="replace")


def _strings(content: object) -> str:
    return "\0".join(reversed(flat([content])))


# -- where it lives ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return xxh3_64_intdigest(name.encode())


def home(session: bytes, among: Iterable[str]) -> str | None:
    """The replica where a session lives, of those that are there: the one with the highest score. None without any."""
    return max(among, key=lambda name: (xxh3_64_intdigest(session, _seed(name)), name), default=None)


class Split:
    """Groups of replicas by their share of the sessions: `--split canary=10%` sends a tenth there for good.

    When a share changes, only sessions move that have to.

    shares: by group, from 0 to 1; they add up to 1 at most. What is left goes to REST.
    """

    def __init__(self, shares: Mapping[str, float]) -> None:
        weights = {**shares, REST: max(0.0, 1.0 - sum(shares.values()))}
        self._weights = {group: weight for group, weight in weights.items() if weight > 1e-9}

    def group(self, session: bytes) -> str:
        """The group of a session."""

        def score(group: str) -> tuple[float, str]:
            drawn = xxh3_64_intdigest(session, _seed(_GROUP + group))
            return math.log((drawn + 0.5) / 2**64) / self._weights[group], group

        return max(self._weights, key=score)


# -- exceptions --------------------------------------------------------------------------------------------------------


class Recent(OrderedDict[K, V]):
    """A dict that drops the longest unused entry once it has more than `max_entries`."""

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._max_entries:
            self.popitem(last=False)

    def used(self, key: K) -> V | None:
        """The value of a key, which counts as a use of it; None without one."""
        if key not in self:
            return None
        self.move_to_end(key)
        return self[key]


class StatefulSessions:
    """Which replica made which of SageMaker's sessions, or which stored response: only there it is known.

        NEW_SESSION -> the cheapest replica -> its response names the id -> bound here until it expires
        ID          -> that replica            CLOSE -> that replica, and forgotten here

    Ids are known by owner: another owner's id is one that is not known here, and no owner's ids push out those of one
    who has fewer.

    lasts_s: life of a session for which the replica names no end.
    is_kept: one whose replica is gone stays bound to it: no other replica can ever take it over.
    lost:    sessions whose replica was gone when they were asked for.
    """

    def __init__(
        self, clock: Clock, max_sessions: int = MAX_SESSIONS, lasts_s: float = _LASTS_S, *, is_kept: bool = False
    ) -> None:
        self._clock = clock
        self._lasts_s = lasts_s
        self._is_kept = is_kept
        self._homes: Parted[str, tuple[str, float]] = Parted(max_sessions)
        self.lost = 0

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, name: str | None, owner: bytes = b"") -> str | None:
        """The replica of a session; None if it is not known here, or has expired."""
        if not name or name == NEW_SESSION or (found := self._homes.used(owner, name)) is None:
            return None
        if found[1] <= self._clock.unix():
            self._homes.pop(owner, name)
            return None
        return found[0]

    def note(self, replica: str, new: str, closed: str, owner: bytes = b"") -> None:
        """Take over what the headers of a replica's response say of sessions; "" says nothing."""
        self._homes.pop(owner, closed.strip())
        name, _, rest = new.partition(";")
        if 0 < len(name := name.strip()) <= _MAX_ID:
            self._homes.put(owner, name, (replica, self._ends_s(rest)))

    def lose(self, name: str, owner: bytes = b"") -> None:
        """A session's replica is gone, and so is the session, unless it is kept for when the replica is back."""
        if not self._is_kept:
            self.lost += self._homes.pop(owner, name) is not None

    def _ends_s(self, attributes: str) -> float:
        _, _, given = attributes.partition("Expires=")
        try:
            return datetime.strptime(given.strip(), "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
        except ValueError:
            return self._clock.unix() + self._lasts_s
