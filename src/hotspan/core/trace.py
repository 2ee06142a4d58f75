"""Request traces: what they hold, what they are like, and files in Mooncake's format or of agents' sessions.

A row of a file is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`: each id
names a block of 512 tokens and all that stands before it; the last block may be a part of one. `"block_tokens": N` in
every row says that blocks have N tokens instead; `"servers": [{...}]` in the first row what was recorded
(core/recorded.py). `"sections": [[start, tokens, id], ...]` names texts in the prompt, such as documents, whatever
stands before them. These may stand in a row, too: `finish_reason`; `session`, a number that requests of one
conversation share; and of what it awaits in a closed loop `after`, numbers of earlier rows, from 0 on, with `think_ms`.
Rows with `session` and `duration_ms` and without `after` await the session's last answer.

Sessions of agents (core/agent_sessions.py) are a file of them or a directory of files. Any file may be compressed: .xz
or .gz.
"""

import gzip
import lzma
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Final, Self

import orjson

from hotspan.core.agent_sessions import requests_of
from hotspan.core.errors import ConfigError
from hotspan.core.recorded import RecordedServer, recorded_servers
from hotspan.core.requests import BLOCK_RANGE, BLOCK_TOKENS, FINISH_REASONS, Request, Section

__all__ = ["BLOCK_RANGE", "BLOCK_TOKENS", "Request", "Section", "Trace", "TraceFacts", "read", "write"]

_MAX_TOKENS: Final = 1 << 24
_SHARED: Final = 0.02
_MIN_SHARED: Final = 100
_FIRST_BLOCKS: Final = 32


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace is like. None: not published of the real one.

    asked_before:     share of the blocks, partial ones included, that an unbounded cache finds.
    footprint_blocks: different whole blocks. `reused`: the share of them that is asked for more than once.
    recorded_hit_rate, recorded_ttft_s: of the server that the trace was recorded from; the latter is a mean.
    sessions, finish_reasons: of which the trace tells; None if it tells of none.
    """

    requests: int
    mean_tokens: float
    median_tokens: int
    asked_before: float
    span_s: float
    mean_answer_tokens: float
    footprint_blocks: int | None = None
    reused: float | None = None
    recorded_hit_rate: float | None = None
    recorded_ttft_s: float | None = None
    sessions: int | None = None
    finish_reasons: dict[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, and how many tokens a key stands for.

    servers: that it was recorded from, as far as they told.
    """

    name: str
    requests: tuple[Request, ...]
    block_tokens: int = BLOCK_TOKENS
    servers: tuple[RecordedServer, ...] = ()

    @classmethod
    def of(
        cls,
        name: str,
        requests: Sequence[Request],
        block_tokens: int = BLOCK_TOKENS,
        servers: tuple[RecordedServer, ...] = (),
    ) -> Self:
        """These requests, with the sessions that a trace does not name.

        Raises: ConfigError if there are none.
        """
        if not requests:
            raise ConfigError(f"the trace {name} has no requests: ask for more, or give another")
        return cls(name, tuple(_with_sessions(requests)), block_tokens, servers)

    @property
    def is_closed(self) -> bool:
        """Whether requests await answers to earlier ones: to be replayed in a closed loop."""
        return any(each.after for each in self.requests)

    def faster(self, factor: float) -> Self:
        """The same requests in less time. In a closed loop sessions begin sooner, and think as long as before."""
        begun: list[float] = []  # when the first that each awaits, over any others, came
        found: list[Request] = []
        for each in self.requests:
            begun.append(begun[each.after[0]] if each.after else each.at_s)
            found.append(each._replace(at_s=each.at_s - begun[-1] + begun[-1] / factor))
        if not self.is_closed:
            return replace(self, requests=tuple(found))
        order = sorted(range(len(found)), key=lambda n: (found[n].at_s, n))
        place = {n: at for at, n in enumerate(order)}
        moved = (found[n]._replace(after=tuple(sorted(place[each] for each in found[n].after))) for n in order)
        return replace(self, requests=tuple(moved))

    def facts(self) -> TraceFacts:
        """What it is like."""
        asked: Counter[int] = Counter()
        found = partial = 0
        for each in self.requests:
            found += next((n for n, key in enumerate(each.keys) if key not in asked), len(each.keys))
            partial += each.partial is not None
            asked.update(each.keys)
        blocks = asked.total() + partial
        cached = [each for each in self.requests if each.cached_tokens is not None]
        timed = [each.ttft_s for each in self.requests if each.ttft_s is not None]
        ends = Counter(each.finish_reason for each in self.requests)
        named = {each.session for each in self.requests} if self.is_closed else None
        return TraceFacts(
            requests=len(self.requests),
            mean_tokens=statistics.fmean(each.tokens for each in self.requests),
            median_tokens=statistics.median_high(each.tokens for each in self.requests),
            asked_before=found / blocks if blocks else 0.0,
            span_s=self.requests[-1].at_s - self.requests[0].at_s,
            mean_answer_tokens=statistics.fmean(each.answer_tokens for each in self.requests),
            footprint_blocks=len(asked),
            recorded_hit_rate=_hit_rate(cached) if cached else None,
            recorded_ttft_s=statistics.fmean(timed) if timed else None,
            reused=sum(times > 1 for times in asked.values()) / len(asked) if asked else 0.0,
            sessions=None if named is None else len(named),
            finish_reasons=dict(ends) if any(ends) else None,
        )


def _hit_rate(requests: Sequence[Request]) -> float:
    return sum(each.cached_tokens or 0 for each in requests) / sum(each.tokens for each in requests)


def read(path: Path, requests: int | None = None) -> Trace:
    """The requests of a file, or of a directory of sessions; or the first so many of them.

    Raises: ConfigError that names the line which is not what it should be.
    """
    try:
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if ".json" in each.suffixes)
            return _of_sessions(path, ((str(each), _one_object(each)) for each in files), requests)
        with opened(path) as file:
            sessions = _sessions_in(file, path)
            return _of_rows(path, file, requests) if sessions is None else _of_sessions(path, sessions, requests)
    except (OSError, EOFError, lzma.LZMAError) as error:
        raise ConfigError(f"the trace {path} can't be read: {getattr(error, 'strerror', None) or error}") from error


def opened(path: Path) -> IO[bytes]:
    """A file to read, unpacked if its name ends in .xz or .gz."""
    if path.suffix == ".xz":
        return lzma.open(path)
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")  # type: ignore[return-value]


def _of_rows(path: Path, lines: Iterable[bytes], requests: int | None) -> Trace:
    found: list[Request] = []
    block_tokens: int | None = None
    servers: tuple[RecordedServer, ...] = ()
    sessions = _LastOfSessions()
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            fields = _fields(line, where)
            block_tokens = _block_tokens(fields, block_tokens, where)
            servers = servers or recorded_servers(fields, where)
            each = _request(fields, block_tokens, where)
            found.append(sessions.follow(each, len(found), fields, where))
            if len(found) > 1 and found[-1].at_s < found[-2].at_s:
                raise ConfigError(f"{where}: is earlier than the line before; sort by timestamp")
        if len(found) == requests:
            break
    return Trace.of(path.name.split(".")[0], found, block_tokens or BLOCK_TOKENS, servers)


def _of_sessions(path: Path, sessions: Iterable[tuple[str, Any]], requests: int | None) -> Trace:
    found, block_tokens = requests_of(sessions)
    return Trace.of(path.name.split(".")[0], found[:requests], block_tokens or BLOCK_TOKENS)


def _sessions_in(file: IO[bytes], path: Path) -> Iterator[tuple[str, Any]] | None:
    """The sessions of a file, which is one or has one a line; None if it has none, and stands at its begin then."""
    first = next((line for line in file if line.strip()), b"")
    try:
        is_session = "requests" in (orjson.loads(first) or {})
    except (orjson.JSONDecodeError, TypeError):
        is_session = b'"timestamp"' not in first and first.strip() == b"{"
        if is_session:  # an object over several lines
            return iter([(str(path), _one_object(path))])
    file.seek(0)
    if not is_session:
        return None
    return ((f"{path}, line {n}", _fields(line, f"{path}, line {n}")) for n, line in enumerate(file, 1) if line.strip())


def _one_object(path: Path) -> dict[str, Any]:
    with opened(path) as file:
        return _fields(file.read(), str(path))


class _LastOfSessions:
    """What each session's requests await, where rows tell only of sessions and of how long an answer took."""

    def __init__(self) -> None:
        self._ended: dict[bytes, list[tuple[float, int]]] = {}  # of recent ones: when, and which row

    def follow(self, request: Request, place: int, fields: dict[str, Any], where: str) -> Request:
        """The request of a row, with what it awaits. Raises: ConfigError."""
        after = fields.get("after")
        if after is not None:
            if not isinstance(after, list) or not all(type(each) is int and 0 <= each < place for each in after):
                raise ConfigError(f"{where}: after is no list of numbers of earlier rows, from 0 on")
            return request._replace(after=tuple(sorted(after)), think_s=_milliseconds(fields, "think_ms", where))
        took_s = _milliseconds(fields, "duration_ms", where)
        if not request.session or not took_s:
            return request
        ended = self._ended.setdefault(request.session, [])
        done = [each for each in ended if each[0] <= request.at_s]
        self._ended[request.session] = [each for each in ended if each[0] > request.at_s][-_FIRST_BLOCKS:]
        self._ended[request.session] += [*([max(done)] if done else []), (request.at_s + took_s, place)]
        if not done:
            return request
        at_s, last = max(done)
        return request._replace(after=(last,), think_s=request.at_s - at_s)


def write(path: Path, trace: Trace) -> None:
    """Write the requests in Mooncake's format, times in whole milliseconds."""
    own = {} if trace.block_tokens == BLOCK_TOKENS else {"block_tokens": trace.block_tokens}
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers: dict[bytes, int] = {}
    with path.open("wb") as file:
        for each in trace.requests:
            fields = {
                "timestamp": round(each.at_s * 1000),
                "input_length": each.tokens,
                "output_length": each.answer_tokens,
                "hash_ids": [*each.keys, *([] if each.partial is None else [each.partial])],
            } | own
            if each.sections:
                fields["sections"] = [[start, stop - start, key] for key, start, stop in each.sections]
            if trace.is_closed:
                fields["session"] = numbers.setdefault(each.session, len(numbers))
                fields |= {"after": list(each.after), "think_ms": round(each.think_s * 1000)}
            if each.finish_reason:
                fields["finish_reason"] = each.finish_reason
            if each.is_subagent:
                fields["is_subagent"] = True
            file.write(orjson.dumps(fields) + b"\n")


def _fields(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: is no JSON object")
    return fields


def _block_tokens(fields: dict[str, Any], before: int | None, where: str) -> int:
    """Of this row's blocks. Raises: ConfigError if it is no number, or another one than in the rows before."""
    found, (least, most) = fields.get("block_tokens", BLOCK_TOKENS), BLOCK_RANGE
    if type(found) is not int or not least <= found <= most:
        raise ConfigError(f"{where}: block_tokens is no whole number from {least} to {most}: {found!r}")
    if before not in (None, found):
        raise ConfigError(f"{where}: has blocks of {found} tokens, the lines before of {before}: record them again")
    return found


def _request(fields: dict[str, Any], block_tokens: int, where: str) -> Request:
    tokens = _count(fields, "input_length", where, least=1)
    answer_tokens = _count(fields, "output_length", where)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(key) is int and 0 <= key < 1 << 64 for key in ids):
        raise ConfigError(f"{where}: hash_ids is no list of whole numbers from 0 to 2^64")
    blocks = tokens // block_tokens
    if not blocks <= len(ids) <= blocks + 1:
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids do not name the {block_tokens}-token blocks of {tokens} tokens; "
            f"{blocks} or {blocks + 1} do"
        )
    at_ms = fields.get("timestamp")
    if not isinstance(at_ms, int | float) or isinstance(at_ms, bool) or not 0 <= at_ms < 1e15:
        raise ConfigError(f"{where}: timestamp is no number of milliseconds: {at_ms!r}")
    ttft_ms, cached = fields.get("ttft_ms"), fields.get("cached_length")
    return Request(
        *(at_ms / 1000, tokens, answer_tokens, tuple(ids[:blocks]), ids[blocks] if len(ids) > blocks else None),
        ttft_s=ttft_ms / 1000 if isinstance(ttft_ms, int | float) else None,
        cached_tokens=cached if type(cached) is int else None,
        sections=tuple(_sections(fields.get("sections", []), tokens, where)),
        session=_session(fields.get("session"), where),
        finish_reason=FINISH_REASONS.get(str(fields.get("finish_reason")), ""),
        is_subagent=fields.get("is_subagent") is True,
        took_s=_milliseconds(fields, "duration_ms", where) or None,
    )


def _session(given: Any, where: str) -> bytes:
    if given is None:
        return b""
    if type(given) is not int or not 0 <= given < 1 << 64:
        raise ConfigError(f"{where}: session is no whole number from 0 to 2^64: {given!r:.60}")
    return b"session %d" % given


def _milliseconds(fields: dict[str, Any], name: str, where: str) -> float:
    """In seconds. Raises: ConfigError."""
    value = fields.get(name, 0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise ConfigError(f"{where}: {name} is no number of milliseconds: {value!r}")
    return value / 1000


def _sections(given: Any, tokens: int, where: str) -> Iterator[Section]:
    """Raises: ConfigError if they are not within the prompt, in order and without overlap."""
    at, rows = 0, given if isinstance(given, list) else [given]
    for row in rows:
        is_row = isinstance(row, list) and len(row) == 3 and all(type(value) is int for value in row)
        if not is_row or row[0] < at or row[1] < 1 or row[0] + row[1] > tokens or not 0 <= row[2] < 1 << 64:
            raise ConfigError(
                f"{where}: sections has {row!r:.80}: give [start, tokens, id] for texts within the {tokens} tokens of "
                "the prompt, in order and without overlap"
            )
        at = row[0] + row[1]
        yield Section(row[2], row[0], at)


def _count(fields: dict[str, Any], name: str, where: str, least: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= _MAX_TOKENS:
        raise ConfigError(f"{where}: {name} is no whole number of tokens from {least} to {_MAX_TOKENS}: {value!r}")
    return value


def _with_sessions(requests: Sequence[Request]) -> Iterator[Request]:
    """Name each that has no name as a router does without a header: by the first block that is no system prompt.

    A system prompt is what at most 2 % of the requests, and at least 100, begin with.
    """
    often = Counter(key for each in requests for key in _first_blocks(each))
    shared = max(_MIN_SHARED, _SHARED * len(requests))
    for n, each in enumerate(requests):
        if each.session:
            yield each
            continue
        own = next((key for key in _first_blocks(each) if often[key] <= shared), None)
        yield each._replace(session=b"request %d" % n if own is None else own.to_bytes(8, "big"))


def _first_blocks(each: Request) -> Iterable[int]:
    first = each.keys[:_FIRST_BLOCKS]
    return first if each.partial is None else (*first, each.partial)
