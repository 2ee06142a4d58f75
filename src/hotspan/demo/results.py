"""What a demo measured, as JSON: everything, or what a claim needs to cite."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from hotspan.bench.compare import AnswerMatch, NamedRun, answers_as, cpu_s, ratio, speed_up, spread
from hotspan.bench.records import BenchResult, RoundName
from hotspan.demo.model import DemoModel
from hotspan.demo.plan import BOUND, DemoRequest
from hotspan.demo.shown import Shown, to_json

SCHEMA_VERSION = 1

_SPREAD: Final = (
    *("elapsed_s", "ttft_s", "request_latency_s", "inter_token_s", "output_throughput"),
    *("cpu_s", "hit_rates", "cached_rate"),
)
"""The figures of a round whose median and range are given; the others follow from them or never differ."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The runs of a demo so far, one for each mode, and what was asked for.

    shown:    one question's answers, by mode. warnings: what was disturbed.
    `serve` has, by mode, the server's arguments without what belongs to this machine: paths, port.
    """

    request: DemoRequest
    model: DemoModel
    runs: Sequence[NamedRun]
    serve: Mapping[str, Sequence[str]]
    shown: Sequence[Shown] = ()
    warnings: Sequence[str] = ()

    @property
    def bound(self) -> NamedRun | None:
        return next((run for run in self.runs if run.name == BOUND), None)

    def answers(self, run: NamedRun) -> AnswerMatch | None:
        """The answers of `run` compared with the engine's own hit; None where that says nothing."""
        return answers_as(run, self.bound) if self.bound else None

    def to_json(self) -> dict[str, Any]:
        """Everything, answers and requests included."""
        modes = [
            self._mode(run) | {"server": run.command, "results": [result.to_json() for result in run.results]}
            for run in self.runs
        ]
        return self._head() | {"shown": to_json(self.shown), "modes": modes}

    def to_compact_json(self) -> dict[str, Any]:
        """Summaries of each round, mode and repetition, and what follows from them; no text and no single request."""
        machine = dict(self.runs[0].results[0].machine)
        commit = machine.pop("Commit", "")
        modes = [self._mode(run) | {"repetitions": [_summaries(result) for result in run.results]} for run in self.runs]
        measured = self.runs[0].results[0].started_at
        return self._head() | {"started_at": measured, "commit": commit, "machine": machine, "modes": modes}

    def _head(self) -> dict[str, Any]:
        model = {"size": self.model.size, "parameters": self.model.parameters}
        return {
            "schema": SCHEMA_VERSION,
            "command": self.request.command,
            "sizes": asdict(self.request.sizes),
            "threads": self.request.engine_threads,
            "dtype": self.request.dtype,
            "repetitions": self.request.repetitions,
            "warnings": list(self.warnings),
            "model": model | {"kv_bytes_per_token": self.model.kv_bytes_per_token},
        }

    def _mode(self, run: NamedRun) -> dict[str, Any]:
        first = self.runs[0]
        to_bound = ratio(run, self.bound, cpu_s(RoundName.QUERY)) if self.bound else None
        to_first = ratio(run, first, cpu_s(RoundName.WARM_UP))
        match = self.answers(run)
        return {
            "name": run.name,
            "title": run.title,
            "note": run.note,
            "serve": shlex.join(self.serve[run.name]),
            "speed_up": {"over": first.name, **asdict(speed_up(run, first))},
            "query_cpu_ratio": {"to": BOUND, "value": asdict(to_bound) if to_bound else None},
            "warm_up_cpu_ratio": {"to": first.name, "value": asdict(to_first) if to_first else None},
            "same_answers": {"as": BOUND, **asdict(match)} if match else None,
            "rounds": {
                name: {key: _spreads([summary[key] for summary in summaries]) for key in _SPREAD}
                for name, summaries in _by_round(run).items()
            },
        }


def _by_round(run: NamedRun) -> dict[str, list[dict[str, Any]]]:
    """The summaries of each round, one for each repetition."""
    names = [played.name.value for played in run.results[0].rounds]
    return {name: [_summaries(result)[name] for result in run.results] for name in names}


def _summaries(result: BenchResult) -> dict[str, Any]:
    return {played.name.value: played.summary.to_json() for played in result.rounds}


def _spreads(values: Sequence[Any]) -> Any:
    """Objects of one shape as one such object, with the spread of each number."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    if not isinstance(known[0], dict):
        return asdict(found) if (found := spread(known)) else None
    keys = dict.fromkeys(key for value in known for key in value)
    return {key: _spreads([value.get(key) for value in known]) for key in keys}


def compact_text(value: Any, indent: str = "") -> str:
    """JSON to keep in a repository: six significant digits, and a line for each object that holds no other."""
    if isinstance(value, float):
        return f"{value:.6g}"
    if not isinstance(value, dict | list) or not value:
        return json.dumps(value)
    deeper = indent + " "
    if isinstance(value, dict):
        opening, closing, items = "{", "}", list(value.values())
        texts = [f"{json.dumps(key)}: {compact_text(item, deeper)}" for key, item in value.items()]
    else:
        opening, closing, items = "[", "]", value
        texts = [compact_text(item, deeper) for item in items]
    if not any(isinstance(item, dict | list) and item for item in items):
        return opening + ", ".join(texts) + closing
    return f"{opening}\n{deeper}" + f",\n{deeper}".join(texts) + f"\n{indent}{closing}"
