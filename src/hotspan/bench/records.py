"""What a benchmark measured: one record a request, one result a round, one result a run, to and from JSON.

Times are seconds on a monotonic clock whose zero is the start of the run, so that records of one run compare with each
other and with nothing else.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from hotspan.bench.scores import final_answer
from hotspan.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """What a check of answers (runner.py) found.

    asked:     questions whose three requests were all answered.
    same:      of them, those whose answer is the engine's own.
    hits:      of them, those that the server says it found in a cache; None if it does not say.
    different: ids of the requests whose answers differ.
    failed:    ids of those of which a request failed.
    not_anew:  ids of those that the server did not compute anew, though they had a salt of their own.
    """

    asked: int
    same: int
    hits: int | None
    different: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    not_anew: tuple[str, ...] = ()

    @property
    def is_passed(self) -> bool:
        """Whether all answers were compared and are the engine's own."""
        return self.asked > 0 and self.same == self.asked and not self.failed and not self.not_anew

    def __str__(self) -> str:
        said = f"answers: {self.same} of {self.asked} are those that the engine computes without a cache"
        if self.hits is not None:
            said += f" ({self.hits} came from a cache)"
        for what, names in (
            ("DIFFERENT", self.different),
            ("failed", self.failed),
            ("not checked, since the server does not compute a new cache_salt anew", self.not_anew),
        ):
            said += f"; {what}: {', '.join(names)}" if names else ""
        return said


SCHEMA_VERSION = 1


class RoundName(StrEnum):
    """The rounds, in their order. Few workloads have all.

    `ANEW` asks the questions of the query round with a `cache_salt` each, so that no cache has anything of them.
    `CHECK` asks the questions of the query round again, one at a time. Requests that run together are computed in
    batches of other shapes, whose sums round otherwise; alone, equal hits compute equal shapes, so that their answers
    must be equal too. It is played for its answers, not for its times, and only where it is asked for.
    """

    PRE_WARM_UP = "pre-warm-up"
    WARM_UP = "warm-up"
    QUERY = "query"
    ANEW = "anew"
    CHECK = "check"


TIMED_ROUNDS: Final = (RoundName.PRE_WARM_UP, RoundName.WARM_UP, RoundName.QUERY, RoundName.ANEW)
"""The rounds whose latencies are reported, which are also those that a benchmark plays by default."""


class Loop(StrEnum):
    """What decides when the next request is sent: the answers so far (closed), or the schedule alone (open).

    In a closed loop a slow server is sent less, and what waited for it is in no latency (coordinated omission).
    """

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Mean and percentiles of a sample; the percentiles interpolate linearly."""

    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """What one request asked, got and took.

    Units: seconds; token counts are the server's own (`usage`). `decode_speed` is output tokens after the first per
           second of decoding, 0 where there is no second token.
    """

    request_id: str
    order: int
    successful: bool
    submit_time: float
    first_token_time: float
    finish_time: float
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    cached_tokens: int | None = None  # None: the server doesn't say
    inter_token_s: tuple[float, ...] = field(default=(), repr=False)
    answer: str = field(default="", repr=False)
    finish_reason: str = ""
    error: str = ""
    due_time: float | None = None  # None: the schedule named no time
    is_right: bool | None = None  # None: no answer to it is known
    f1: float | None = None  # of the answer's words against a known answer's
    sample_id: str = ""  # of a question in a dataset whose answer is to be in tags

    @property
    def is_parsed(self) -> bool:
        """Whether the answer ends with a complete `<final_answer>`."""
        return self.successful and bool(final_answer(self.answer))

    @property
    def ttft(self) -> float:
        """Seconds from submission to the first non-empty content or reasoning; 0 for a request that failed."""
        return self.first_token_time - self.submit_time if self.successful else 0.0

    @property
    def request_latency(self) -> float:
        return self.finish_time - self.submit_time

    @property
    def decode_speed(self) -> float:
        decoding_s = self.finish_time - self.first_token_time
        if not self.successful or self.num_output_tokens < 2 or decoding_s <= 0:
            return 0.0
        return (self.num_output_tokens - 1) / decoding_s

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first: the mean over all tokens, those that showed nothing included."""
        speed = self.decode_speed
        return 1 / speed if speed > 0 else None

    @property
    def late_s(self) -> float | None:
        """Seconds from when it was due until it was sent."""
        return None if self.due_time is None else max(0.0, self.submit_time - self.due_time)

    @property
    def ttft_from_due(self) -> float | None:
        """TTFT of a user whose clock ran from when the request was due: what waited for its turn counts too."""
        return self.ttft + self.late_s if self.successful and self.late_s is not None else None

    @property
    def answer_sha256(self) -> str:
        """The digest of the answer's UTF-8, empty for a request that failed: a failure equals no answer."""
        return sha256(self.answer.encode()).hexdigest() if self.successful else ""


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to be a good one: TTFT from its submission, and its mean inter-token latency (TPOT).

    Seconds; None is no bound. A request that failed kept nothing.
    """

    ttft_s: float | None = None
    itl_s: float | None = None

    def is_kept_by(self, record: RequestRecord) -> bool:
        is_soon = self.ttft_s is None or record.ttft <= self.ttft_s
        is_fast = self.itl_s is None or record.tpot is None or record.tpot <= self.itl_s
        return record.successful and is_soon and is_fast


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Prompt tokens that the server's counters say each tier answered during one round.

    `hit_tokens` names only the tiers that the server reports; `lookup_tokens` is what was asked of hotspan's tiers.
    """

    hit_tokens: Mapping[str, float]
    lookup_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class TimedUse:
    """The use of the caches from the sample before until `at_s`, in seconds of the run's clock."""

    at_s: float
    use: CacheUse


@dataclass(frozen=True, slots=True)
class RoundSummary:
    """The figures of one round: seconds, tokens, tokens per second.

    unsent:          requests that were due and were not sent before the round's time was over.
    late_s:          how late requests were sent, against a schedule that names times.
    ttft_from_due_s: TTFT with that wait in it.
    within_slo:      requests that kept the objective; None where there was none.
    scored, right:   requests whose right answers are known, and those that were answered so; a failure is not.
    f1:              mean over the requests whose right answers are known; a failure's is 0.
    parsed:          of the scored requests, those with a complete `<final_answer>`; None where none is asked for.
    parsed_f1:       mean F1 of these.
    """

    requests: int
    failed: int
    elapsed_s: float
    ttft_s: Quantiles | None
    request_latency_s: Quantiles | None
    inter_token_s: Quantiles | None
    inter_token_p99_s: Quantiles | None  # over requests, of each request's own p99
    decode_speed: Quantiles | None  # p90 and p99 are the slow tail: 90 and 99 % of requests are at least this fast
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    input_throughput: float
    output_throughput: float
    cpu_s: float | None  # user + system of the server's process tree
    cache: CacheUse | None
    tpot_s: Quantiles | None = None
    late_s: Quantiles | None = None
    ttft_from_due_s: Quantiles | None = None
    unsent: int = 0
    within_slo: int | None = None
    scored: int = 0
    right: int = 0
    f1: float | None = None
    parsed: int | None = None
    parsed_f1: float | None = None

    @property
    def parse_rate(self) -> float | None:
        return None if self.parsed is None else self.parsed / self.scored

    @property
    def quality(self) -> float | None:
        """Share of right answers; None where none is known."""
        return self.right / self.scored if self.scored else None

    @property
    def success_rate(self) -> float:
        """Share of the sent requests that were answered."""
        return (self.requests - self.failed) / self.requests if self.requests else 0.0

    @property
    def goodput(self) -> float | None:
        """Requests a second that kept the objective."""
        return None if self.within_slo is None else self.within_slo / max(self.elapsed_s, 1e-9)

    @property
    def hit_rates(self) -> dict[str, float]:
        """Hit rate by tier: the tier's hit tokens over the round's prompt tokens; empty where unknown."""
        if self.cache is None or self.prompt_tokens == 0:
            return {}
        return {tier: hit / self.prompt_tokens for tier, hit in self.cache.hit_tokens.items()}

    @property
    def cached_rate(self) -> float | None:
        """Share of the prompt tokens that the server's usage calls cached, whatever the tier."""
        if self.cached_tokens is None or self.prompt_tokens == 0:
            return None
        return self.cached_tokens / self.prompt_tokens

    def to_json(self) -> dict[str, Any]:
        """The figures as JSON, the derived ones included."""
        return _with_derived(self, "hit_rates", "cached_rate", "success_rate", "goodput", "quality", "parse_rate")


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round: its figures and its requests, in order of dispatch.

    timeline: the use of the caches, sampled while it went on; empty where that was not done.
    """

    name: RoundName
    summary: RoundSummary
    records: tuple[RequestRecord, ...] = field(repr=False)
    loop: Loop = Loop.CLOSED
    timeline: tuple[TimedUse, ...] = field(default=(), repr=False)

    @property
    def pacing(self) -> str:
        """What kind of loop sent the requests, and how far it fell behind; "" where no times were named."""
        late = self.summary.late_s
        if late is None:
            return ""
        behind = f"Requests were sent {late.p50:.3f} s (p50) and {late.p99:.3f} s (p99) after they were due"
        behind += f", and {self.summary.unsent} that were due were not sent at all." if self.summary.unsent else "."
        if self.loop is Loop.OPEN:
            return f"Open loop: only turns of the same session wait for each other. {behind}"
        return (
            f"Closed loop: a busy session holds back all turns after its own. {behind} TTFT leaves that wait out "
            "(coordinated omission); TTFT from due has it, of the turns that were sent."
        )

    def to_json(self) -> dict[str, Any]:
        """The round as JSON, the derived figures of summary and requests included."""
        derived = ("ttft", "request_latency", "decode_speed", "tpot", "answer_sha256")
        records = [_with_derived(record, *derived) for record in self.records]
        own = {"name": self.name, "loop": self.loop, "summary": self.summary.to_json(), "records": records}
        return own | {"timeline": msgspec.to_builtins(self.timeline)}


@dataclass(frozen=True, slots=True)
class BenchResult:
    """One run of a workload against one server.

    `config` is the resolved configuration, flat, in the keys of the configuration file. `check` is None where no
    answers were checked.
    """

    config: Mapping[str, Any]
    rounds: tuple[RoundResult, ...]
    started_at: str = ""
    command: str = ""
    machine: Mapping[str, str] = field(default_factory=dict)
    check: AnswerCheck | None = None

    def round(self, name: RoundName) -> RoundResult | None:
        """The round of that name, or None where the run had none."""
        return next((r for r in self.rounds if r.name == name), None)

    @property
    def query(self) -> RoundResult:
        """The query round, which every run has."""
        found = self.round(RoundName.QUERY)
        if found is None:
            raise ConfigError("this result has no query round: it was cut short; run the benchmark again")
        return found

    @property
    def failed(self) -> int:
        return sum(r.summary.failed for r in self.rounds)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` turns back into an equal result, with the derived figures added."""
        rounds = [played.to_json() for played in self.rounds]
        fields: dict[str, Any] = msgspec.to_builtins(replace(self, rounds=()))
        return {"schema": SCHEMA_VERSION, **fields, "rounds": rounds}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The result that `to_json` wrote; figures that came later than its version are unknown.

        Raises: ConfigError if the object is of another schema, msgspec.ValidationError if it is no result.
        """
        if value.get("schema") != SCHEMA_VERSION:
            raise ConfigError(
                f"this is not a benchmark result of schema {SCHEMA_VERSION} (schema: {value.get('schema')!r}); "
                "give a file that 'hotspan bench engine --output DIR' wrote"
            )
        return msgspec.convert(value, cls)

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """The result in a file.

        Raises: ConfigError if the file can't be read or holds no result.
        """
        try:
            return cls.from_json(json.loads(path.read_text()))
        except (OSError, ValueError, AttributeError, msgspec.ValidationError) as error:
            raise ConfigError(f"{path} can't be read as a benchmark result: {error}") from error


def tiers_of(rounds: Iterable[RoundResult]) -> list[str]:
    """The tiers that any round names, the nearest to the engine first.

    Every engine names "external", which is a tier only where something came from it.
    """
    order = ("gpu", "ram", "disk", "l2", "external")
    rates = [item for r in rounds for item in r.summary.hit_rates.items()]
    found = {tier for tier, rate in rates if tier != "external" or rate > 0}
    return sorted(found, key=lambda tier: (order.index(tier) if tier in order else len(order), tier))


def _with_derived(value: Any, *names: str) -> dict[str, Any]:
    """The fields of a dataclass, and these properties of it."""
    return {**msgspec.to_builtins(value), **{name: getattr(value, name) for name in names}}
