"""What is replayed: requests out of a file in Mooncake's format, or made from a seed.

A row of a file is `{"timestamp": ms, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`: each id
names a block of 512 tokens and all that stands before it; the last block may be a part of one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import orjson

from hotspan.core.errors import ConfigError
from hotspan.simulate.mooncake import BLOCK_TOKENS, CONVERSATION, TOOLAGENT, Trace, TraceFacts
from hotspan.simulate.synthetic import SYNTHETIC

_MOST_TOKENS: Final = 1 << 24
_SHARED: Final = 0.02
_SHARED_LEAST: Final = 100
_LOOKED_AT: Final = 32


class Row(NamedTuple):
    """One request.

    keys:    of its whole blocks, root first.
    partial: of what stands after them; None if nothing does.
    session: what a router would take for the name of its conversation.
    """

    at_s: float
    tokens: int
    answer_tokens: int
    keys: tuple[int, ...]
    partial: int | None = None
    session: bytes = b""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of arrival."""

    name: str
    rows: tuple[Row, ...]

    def faster(self, factor: float) -> "Workload":
        """The same requests in less time."""
        return replace(self, rows=tuple(row._replace(at_s=row.at_s / factor) for row in self.rows))

    def first(self, requests: int) -> "Workload":
        """Its first requests."""
        return replace(self, rows=self.rows[:requests])

    def facts(self) -> "Facts":
        """What it is like."""
        seen: set[int] = set()
        found = blocks = 0
        for row in self.rows:
            found += next((n for n, key in enumerate(row.keys) if key not in seen), len(row.keys))
            blocks += len(row.keys) + (row.partial is not None)
            seen.update(row.keys)
        requests = len(self.rows)
        return Facts(
            requests=requests,
            span_s=self.rows[-1].at_s - self.rows[0].at_s,
            mean_tokens=sum(row.tokens for row in self.rows) / requests,
            mean_answer_tokens=sum(row.answer_tokens for row in self.rows) / requests,
            asked_before=found / blocks if blocks else 0.0,
            footprint_blocks=len(seen),
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """What a workload is like.

    asked_before:     of all blocks, parts of one included, what a cache without bounds finds.
    footprint_blocks: different whole blocks.
    """

    requests: int
    span_s: float
    mean_tokens: float
    mean_answer_tokens: float
    asked_before: float
    footprint_blocks: int


class Drawn(Protocol):
    """What traces are made after: `bench.traces.Shape` and `Synthetic`."""

    @property
    def name(self) -> str: ...

    @property
    def published(self) -> TraceFacts: ...

    def draw(self, seed: int, scale: float = 1.0, span: float = 1.0) -> Trace: ...


SHAPES: Final[dict[str, Drawn]] = {shape.name: shape for shape in (CONVERSATION, SYNTHETIC, TOOLAGENT)}


def draw(shape: Drawn, seed: int, requests: int | None = None) -> Workload:
    """A trace of this shape at its published rate: as many requests as published, or so many, over longer or less."""
    span = 1.0 if requests is None else requests / shape.published.requests
    trace = shape.draw(seed, span=span)
    names: dict[bytes, int] = {}
    rows = []
    for request in trace.requests:
        keys = tuple(names.setdefault(key, len(names)) for key in request.chunks)
        rows.append(Row(request.at_s, request.tokens, request.answer_tokens, keys))
    partial = len(names)
    for n, row in enumerate(rows):
        if row.tokens % BLOCK_TOKENS:
            rows[n] = row._replace(partial=partial)
            partial += 1
    return Workload(trace.name, tuple(_with_sessions(rows)))


def sources(
    names: Sequence[str], requests: int | None = None, rate_scale: float = 1.0
) -> dict[str, Callable[[int], Workload]]:
    """For each trace, a shape's name or a file, what gives the workload of a seed; a file is read once, and now.

    Raises: ConfigError for a name that is neither, or a file that has an error.
    """
    found: dict[str, Callable[[int], Workload]] = {}
    for name in names:
        if name in SHAPES:
            found[name] = partial(_drawn, name, requests, rate_scale)
        else:
            workload = read(Path(name), requests).faster(rate_scale)
            found[name] = partial(_same, workload)
    return found


def _drawn(name: str, requests: int | None, rate_scale: float, seed: int) -> Workload:
    return draw(SHAPES[name], seed, requests).faster(rate_scale)


def _same(workload: Workload, seed: int) -> Workload:
    return workload


def read(path: Path, requests: int | None = None) -> Workload:
    """The requests of a file, or its first so many.

    Raises: ConfigError that names the line which is not what it should be.
    """
    rows: list[Row] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(line, f"{path}, line {number}"))
                    if len(rows) > 1 and rows[-1].at_s < rows[-2].at_s:
                        raise ConfigError(f"{path}, line {number}: is earlier than the line before; sort by timestamp")
                if len(rows) == requests:
                    break
    except OSError as error:
        raise ConfigError(
            f"the trace {path} can't be read ({error.strerror}); give one of {', '.join(SHAPES)}, or a file"
        ) from error
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return Workload(path.stem, tuple(_with_sessions(rows)))


def write(path: Path, workload: Workload) -> None:
    """Write the requests in Mooncake's format, times in whole milliseconds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for row in workload.rows:
            ids = list(row.keys) + ([row.partial] if row.partial is not None else [])
            fields = {
                "timestamp": round(row.at_s * 1000),
                "input_length": row.tokens,
                "output_length": row.answer_tokens,
                "hash_ids": ids,
            }
            file.write(orjson.dumps(fields) + b"\n")


def _row(line: bytes, where: str) -> Row:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ConfigError(f"{where}: is no JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: is no JSON object")
    tokens = _whole(fields, "input_length", where, least=1)
    answer_tokens = _whole(fields, "output_length", where)
    ids = fields.get("hash_ids")
    if not isinstance(ids, list) or not all(type(key) is int and 0 <= key < 1 << 64 for key in ids):
        raise ConfigError(f"{where}: hash_ids is no list of whole numbers from 0 to 2^64")
    blocks = tokens // BLOCK_TOKENS
    if not blocks <= len(ids) <= blocks + 1:
        raise ConfigError(
            f"{where}: {len(ids)} hash_ids do not name the {BLOCK_TOKENS}-token blocks of {tokens} tokens; "
            f"{blocks} or {blocks + 1} do"
        )
    at_s = _number(fields, "timestamp", where) / 1000
    return Row(at_s, tokens, answer_tokens, tuple(ids[:blocks]), ids[blocks] if len(ids) > blocks else None)


def _whole(fields: dict[str, Any], name: str, where: str, least: int = 0) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= _MOST_TOKENS:
        raise ConfigError(f"{where}: {name} is no whole number of tokens from {least} to {_MOST_TOKENS}: {value!r}")
    return value


def _number(fields: dict[str, Any], name: str, where: str) -> float:
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e15:
        raise ConfigError(f"{where}: {name} is no number of milliseconds: {value!r}")
    return float(value)


def _with_sessions(rows: Sequence[Row]) -> Iterator[Row]:
    """Name the conversations, which a trace does not.

    As a router does without a header, by the system prompt and the first message: up to the first block that is no
    system prompt, being what at most 2 % of the requests begin with.
    """
    often = Counter(key for row in rows for key in _beginning(row))
    shared = max(_SHARED_LEAST, _SHARED * len(rows))
    for n, row in enumerate(rows):
        own = next((key for key in _beginning(row) if often[key] <= shared), None)
        name = b"request %d" % n if own is None else own.to_bytes(8, "big")
        yield row._replace(session=name)


def _beginning(row: Row) -> Iterable[int]:
    return row.keys[:_LOOKED_AT] if row.partial is None else (*row.keys[:_LOOKED_AT], row.partial)
