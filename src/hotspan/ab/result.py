"""What a comparison of two sides found, to and from JSON."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from hotspan.ab.statistics import Interval, Share
from hotspan.core.errors import ConfigError

SCHEMA: Final = "hotspan-ab-1"
SAME_SCHEMA: Final = "hotspan-ab-same-1"


class Verdict(StrEnum):
    """What the interval of the drift says of --max-drift."""

    PASS = "pass"
    DRIFT = "drift"
    UNKNOWN = "can't tell"

    @property
    def status(self) -> int:
        """Exit status of the command."""
        return {Verdict.PASS: 0, Verdict.DRIFT: 1, Verdict.UNKNOWN: 2}[self]


@dataclass(frozen=True, slots=True)
class Difference:
    """An item that the sides answer differently.

    at:      position of the first difference, in tokens or characters.
    is_kept: each side gave its answer twice: the difference stays. Otherwise one side differs from itself, too.
    """

    item: str
    at: int
    is_kept: bool
    a: str = field(repr=False)
    b: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both sides. `ratio` is B over A; None where it can't be had."""

    name: str
    unit: str
    a: float
    b: float
    ratio: Interval | None


@dataclass(frozen=True, slots=True)
class Agreement:
    """How close the answers of one pair of visits are.

    different: share of the items with different answers. tokens: share of the tokens before the first difference.
    kl:        mean top-k KL per token, in nats; None without log probabilities.
    """

    pair: str
    different: Share
    tokens: Interval | None
    kl: Interval | None


@dataclass(frozen=True, slots=True)
class Scores:
    """Shares of right answers among the items with an expected one, and how much more of them B has."""

    a: Share
    b: Share
    gain: Interval


@dataclass(frozen=True, slots=True)
class AbResult:
    """A comparison.

    drift:        share of items at which B's answer differs from A's, above the share at which A's own two differ.
    repeat_drift: share at which B's own two differ, above the same.
    needed:       items that a drift of `detect` needs with the noise that was measured; None: too many.
    agreements:   A against itself, B against itself, A against B.
    """

    titles: tuple[str, str]
    config: Mapping[str, Any]
    verdict: Verdict
    why: str
    max_drift: float
    detect: float
    needed: int | None
    items: int
    compared: int
    is_interleaved: bool
    drift: Interval
    repeat_drift: Interval
    agreements: tuple[Agreement, ...]
    differences: tuple[Difference, ...]
    figures: tuple[Figure, ...]
    scores: Scores | None
    failures: tuple[str, ...] = ()
    command: str = ""
    started_at: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `load` reads."""
        return {"schema": SCHEMA, **msgspec.to_builtins(self)}

    @classmethod
    def load(cls, path: Path) -> Self:
        """The result in a file. Raises: ConfigError if the file can't be read or holds none."""
        try:
            value = json.loads(path.read_text())
            if value.get("schema") != SCHEMA:
                raise ValueError(f"its schema is {value.get('schema')!r}, not {SCHEMA!r}")
            return msgspec.convert(value, cls)
        except (OSError, ValueError, AttributeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path} can't be read as a result of `hotspan ab --output FILE`: {error}") from error


@dataclass(frozen=True, slots=True)
class Condition:
    """Answers under one condition, compared with the first ones.

    different: items of which any of the `repeats` answers differs. at: median position of their first differences.
    cached:    share of the prompts' tokens that came from a cache, as the server reports it.
    """

    title: str
    repeats: int
    different: Share
    at: float | None
    cached: float


@dataclass(frozen=True, slots=True)
class SameResult:
    """A check of one server's reproducibility."""

    title: str
    config: Mapping[str, Any]
    verdict: Verdict
    max_drift: float
    items: int
    conditions: tuple[Condition, ...]
    failures: tuple[str, ...] = ()
    command: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Its figures, with a schema of their own."""
        return {"schema": SAME_SCHEMA, **msgspec.to_builtins(self)}


def save(path: Path, result: AbResult | SameResult) -> None:
    """Write a result to a JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result.to_json(), indent=1) + "\n")
