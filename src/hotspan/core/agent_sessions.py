"""Recorded sessions of coding agents, in the format of callanjfox/kv-cache-tester, as requests of one trace.

A session is a JSON object, one a line or one a file: `block_size` (tokens), `hash_id_scope` "local" and `requests`, of
which each has `t` (s since its agent began), `in` and `out` (tokens), `hash_ids` (whole blocks), `stop`, `api_time` and
`think_time` (s). An entry of type `subagent` holds the `requests` of another agent, which began at its `t`. An id names
a block within its session and its sub-agents only, so that sessions share nothing. `start_s`, which is hotspan's own,
is when the session began; without it, sessions begin at moments drawn from the first `SPREAD_S` seconds.

Small blocks are joined into keys of `KEY_TOKENS`. A request comes `think_time` after the answer before it, in its own
agent; an agent's next request also awaits the sub-agents that had ended by then (`Request.after`).
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hotspan.core.errors import ConfigError
from hotspan.core.requests import BLOCK_RANGE, FINISH_REASONS, Request

KEY_TOKENS: Final = 256
"""A key of a session's requests stands for so many, or for a whole block where blocks are larger."""

SPREAD_S: Final = 6 * 3600.0
_SEED: Final = 5
_ROUNDED_S: Final = 1.0  # times in these files are rounded to whole seconds
_MAX_DEPTH: Final = 8


class _Call(NamedTuple):
    """A request of one session. after: numbers of earlier ones of the session; ended_s: of its answer, as recorded."""

    request: Request
    after: tuple[int, ...]
    ended_s: float


@dataclass(slots=True)
class _Session:
    """The requests of one session, as they are read.

    tokens: of a block, `step` of which make a key. keys: by what is before a key, and its blocks.
    ids, chain: of the last request.
    """

    name: str
    tokens: int
    step: int
    where: str
    first_key: int
    keys: dict[tuple[int, tuple[int, ...]], int] = field(default_factory=dict)
    calls: list[_Call] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    chain: tuple[int, ...] = ()

    def read(self, entries: Any, begins_s: float, after: int | None = None, depth: int = 0) -> list[int]:
        """Add an agent's requests; their numbers. after: the request that began this agent."""
        if not isinstance(entries, list) or depth > _MAX_DEPTH:
            raise ConfigError(f"{self.where}: requests is no list, or sub-agents are nested deeper than {_MAX_DEPTH}")
        own: list[int] = []
        running: list[int] = []  # last requests of sub-agents that no request of this agent has awaited yet
        for entry in entries:
            if not isinstance(entry, dict):
                raise ConfigError(f"{self.where}: a request is no JSON object: {entry!r:.60}")
            at_s = begins_s + _number(entry, "t", self.where)
            last = own[-1] if own else after
            if entry.get("type") == "subagent":
                running += self.read(entry.get("requests"), at_s, last, depth + 1)[-1:]
                continue
            ended = [each for each in running if self.calls[each].ended_s <= at_s + _ROUNDED_S]
            running = [each for each in running if each not in ended]
            awaited = (*([] if last is None else [last]), *ended)
            own.append(len(self.calls))
            self.calls.append(self._call(entry, at_s, awaited, is_first=len(own) == 1, is_subagent=depth > 0))
        return own + running

    def _call(
        self, entry: dict[str, Any], at_s: float, after: tuple[int, ...], *, is_first: bool, is_subagent: bool
    ) -> _Call:
        tokens, answer_tokens = (int(_number(entry, name, self.where)) for name in ("in", "out"))
        if tokens < 1:
            raise ConfigError(f"{self.where}: a request has no tokens; `in` must be 1 or more")
        api_s = _number(entry, "api_time", self.where, 0.0)
        think_s = max(0.0, at_s - max((self.calls[each].ended_s for each in after), default=at_s))
        if len(after) == 1 and not is_first:
            think_s = _number(entry, "think_time", self.where, think_s)
        request = Request(
            *(at_s, tokens, answer_tokens, self._chain(entry.get("hash_ids"), tokens)),
            session=self.name.encode(),
            finish_reason=FINISH_REASONS.get(str(entry.get("stop") or ""), ""),
            think_s=think_s,
            is_subagent=is_subagent,
        )
        return _Call(request, after, at_s + api_s)

    def _chain(self, ids: Any, tokens: int) -> tuple[int, ...]:
        """The keys of a prompt's blocks. Most prompts begin with all of the one before: these are not hashed again."""
        if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
            raise ConfigError(f"{self.where}: hash_ids is no list of whole numbers")
        step, keys = self.step, self.keys
        same = _common(ids, self.ids) // step
        found = list(self.chain[:same])
        parent = found[-1] if found else -1
        for at in range(same * step, len(ids) - step + 1, step):
            parent = keys.setdefault((parent, tuple(ids[at : at + step])), self.first_key + len(keys))
            found.append(parent)
        if len(found) > tokens // (self.tokens * step):
            raise ConfigError(f"{self.where}: a request of {tokens} tokens has {len(ids)} blocks, which are more")
        self.ids, self.chain = ids, tuple(found)
        return self.chain


def _common(first: list[int], second: list[int]) -> int:
    """How many values both begin with."""
    least, most = 0, min(len(first), len(second))
    if first[:most] == second[:most]:
        return most
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if first[:middle] == second[:middle] else (least, middle - 1)
    return least


def requests_of(sessions: Iterable[tuple[str, Any]]) -> tuple[list[Request], int]:
    """The requests of sessions in order of time, and the tokens of a key.

    sessions: where each stands, for messages, and its JSON.
    Raises:   ConfigError that names what is not as it should be.
    """
    drawn = random.Random(_SEED)
    calls: list[tuple[_Call, int]] = []  # and the number of its session's first
    keys, block_tokens = 0, 0
    for number, (where, fields) in enumerate(sessions):
        begins_s = drawn.uniform(0, SPREAD_S)
        tokens = _block_tokens(fields, where)
        step = max(1, KEY_TOKENS // tokens)
        if block_tokens not in (0, tokens * step):
            raise ConfigError(f"{where}: has blocks of {tokens} tokens, which do not make the {block_tokens} of others")
        block_tokens = tokens * step
        session = _Session(f"session {number}", tokens, step, where, keys)
        session.read(fields.get("requests"), _number(fields, "start_s", where, begins_s))
        keys += len(session.keys)
        first = len(calls)
        calls += [(call, first) for call in session.calls]
    return list(_in_order(calls)), block_tokens


def _in_order(calls: Sequence[tuple[_Call, int]]) -> Iterator[Request]:
    """By time; one that awaits another stands behind it, also where their times are rounded."""
    times: list[float] = []
    for call, first in calls:
        times.append(max([call.request.at_s, *(times[first + each] for each in call.after)]))
    order = sorted(range(len(calls)), key=lambda each: (times[each], each))
    place = {each: n for n, each in enumerate(order)}
    for each in order:
        call, first = calls[each]
        yield call.request._replace(at_s=times[each], after=tuple(sorted(place[first + n] for n in call.after)))


def _block_tokens(fields: Any, where: str) -> int:
    least, most = BLOCK_RANGE
    found = fields.get("block_size") if isinstance(fields, dict) else None
    if type(found) is not int or not least <= found <= most:
        raise ConfigError(f"{where}: block_size is no whole number of tokens from {least} to {most}: {found!r}")
    if fields.get("hash_id_scope") != "local":
        raise ConfigError(f'{where}: hash_id_scope is {fields.get("hash_id_scope")!r}; only "local" is read')
    return found


def _number(fields: dict[str, Any], name: str, where: str, default: float | None = None) -> float:
    value = fields.get(name, default)
    if value is None:
        value = default
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise ConfigError(f"{where}: {name} is no number from 0 on: {value!r}")
    return float(value)
