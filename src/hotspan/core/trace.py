"""Request traces: what they hold, what they are like, and files in Mooncake's format.

A row of a file is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`: each id
names a block of 512 tokens and all that stands before it; the last block may be a part of one. `"block_tokens": N` in
every row says that blocks have N tokens instead. `"sections": [[start, tokens, id], ...]` names texts in the prompt,
such as documents, whatever stands before them.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import orjson

from hotspan.core.errors import ConfigError

BLOCK_TOKENS: Final = 512
"""Of a published trace's blocks."""

BLOCK_RANGE: Final = (16, 8192)
"""Of the tokens of a block."""

_MAX_TOKENS: Final = 1 << 24
_SHARED: Final = 0.02
_MIN_SHARED: Final = 100
_FIRST_BLOCKS: Final = 32


class Section(NamedTuple):
    """Tokens [start, stop) of a prompt, and their name, which does not depend on the text before them."""

    key: int
    start: int
    stop: int


class Request(NamedTuple):
    """One request.

    keys:    of its whole blocks, root first.
    partial: key of the tokens after them; None if there are none.
    session: the name of its conversation, as a router would derive it.
    ttft_s, cached_tokens: as recorded from a server; None if they were not.
    sections: of its prompt, in order and without overlap, as far as they are known.
    """

    at_s: float
    tokens: int
    answer_tokens: int
    keys: tuple[int, ...]
    partial: int | None = None
    session: bytes = b""
    ttft_s: float | None = None
    cached_tokens: int | None = None
    sections: tuple[Section, ...] = ()


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace is like. None: not published of the real one.

    asked_before:     share of the blocks, partial ones included, that an unbounded cache finds.
    footprint_blocks: different whole blocks. `reused`: the share of them that is asked for more than once.
    recorded_hit_rate, recorded_ttft_s: of the server that the trace was recorded from; the latter is a mean.
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


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival, and how many tokens a key stands for."""

    name: str
    requests: tuple[Request, ...]
    block_tokens: int = BLOCK_TOKENS

    @classmethod
    def of(cls, name: str, requests: Sequence[Request], block_tokens: int = BLOCK_TOKENS) -> Self:
        """These requests, with the sessions that a trace does not name.

        Raises: ConfigError if there are none.
        """
        if not requests:
            raise ConfigError(f"the trace {name} has no requests: ask for more, or give another")
        return cls(name, tuple(_with_sessions(requests)), block_tokens)

    def faster(self, factor: float) -> Self:
        """The same requests in less time."""
        return replace(self, requests=tuple(each._replace(at_s=each.at_s / factor) for each in self.requests))

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
        )


def _hit_rate(requests: Sequence[Request]) -> float:
    return sum(each.cached_tokens or 0 for each in requests) / sum(each.tokens for each in requests)


def read(path: Path, requests: int | None = None) -> Trace:
    """The requests of a file, or its first so many.

    Raises: ConfigError that names the line which is not what it should be.
    """
    found: list[Request] = []
    block_tokens: int | None = None
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    where = f"{path}, line {number}"
                    fields = _fields(line, where)
                    block_tokens = _block_tokens(fields, block_tokens, where)
                    found.append(_request(fields, block_tokens, where))
                    if len(found) > 1 and found[-1].at_s < found[-2].at_s:
                        raise ConfigError(f"{where}: is earlier than the line before; sort by timestamp")
                if len(found) == requests:
                    break
    except OSError as error:
        raise ConfigError(f"the trace {path} can't be read: {error.strerror}") from error
    return Trace.of(path.stem, found, block_tokens or BLOCK_TOKENS)


def write(path: Path, trace: Trace) -> None:
    """Write the requests in Mooncake's format, times in whole milliseconds."""
    own = {} if trace.block_tokens == BLOCK_TOKENS else {"block_tokens": trace.block_tokens}
    path.parent.mkdir(parents=True, exist_ok=True)
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
    )


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
    """Name each conversation as a router does without a header: by the first block that is no system prompt.

    A system prompt is what at most 2 % of the requests, and at least 100, begin with.
    """
    often = Counter(key for each in requests for key in _first_blocks(each))
    shared = max(_MIN_SHARED, _SHARED * len(requests))
    for n, each in enumerate(requests):
        own = next((key for key in _first_blocks(each) if often[key] <= shared), None)
        yield each._replace(session=b"request %d" % n if own is None else own.to_bytes(8, "big"))


def _first_blocks(each: Request) -> Iterable[int]:
    first = each.keys[:_FIRST_BLOCKS]
    return first if each.partial is None else (*first, each.partial)
