"""What simulates the server of a recorded trace, out of what the recording tells of it.

Sizes are those of the engines. Rates of tiers are as the engines had measured them. The rest is fitted to the requests:
an engine computes prompts one behind the other, so that a first token comes so long after the one before it, or after
the request came if that is later, as its prompt took:

    seconds = latency + tokens computed / prefill rate + attention x pairs of tokens + tokens found x time to load one

Prompts of one step get their first tokens together: they count as one, with the sums of their tokens.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from hotspan.core.recorded import RecordedServer
from hotspan.core.trace import Request, Trace, TraceFacts
from hotspan.core.types import GIB
from hotspan.simulate.costs import GB

_HITS_OFF, _TTFT_OFF = 0.03, 0.3
_TRUST: Final = ": the simulation of the recorded server is off, so do not trust it with other sizes"

_LEAST_PROMPTS: Final = 4
"""Fewer say nothing of rates."""

_TOGETHER: Final = 0.02
"""First tokens that come within this share of the median time to one came out of one step."""

_WELL_KNOWN: Final = 16
"""So many prompts tell latency and attention apart from the rest."""

_COMPUTED: Final = 1
_SETS: Final = ((0, 1, 2, 3), (0, 1, 3), (1, 2, 3), (1, 3), (0, 1), (1,))
_SETS_OF_FEW: Final = _SETS[3:]
"""Columns of the rows of `_prompts` that are fitted together; what explains little goes first."""

_TIERS: Final = ("ram", "disk", "l2")

Options = dict[str, Any]
"""By the names of options of `hotspan simulate`."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The recorded server, as far as a trace tells of it. block_tokens: of the engine's blocks; 0 if unknown."""

    options: Options = field(default_factory=dict)
    block_tokens: int = 0

    @classmethod
    def of(cls, trace: Trace) -> Self:
        """Nothing if the trace tells of no server."""
        if not trace.servers:
            return cls()
        server = trace.servers[0]
        found: Options = {"replicas": (len(trace.servers),), **_sizes(server), **_rates(server)}
        if len(trace.servers) == 1:
            found["strategy"] = ("auto",)  # there is nothing to choose
        return cls(found | fitted(trace.requests, server.token_bytes), server.block_tokens)

    def differences(self, given: Mapping[str, Any]) -> list[str]:
        """What was given on the command line and is not as the recorded server's, a line each."""
        lines = []
        for name, value in given.items():
            recorded = self.options.get(name)
            if recorded is not None and name != "strategy" and not _is_same(value, recorded):
                flag = "--" + name.replace("_", "-")
                lines.append(f"{flag} is {_said(value)}; the recorded server has {_said(recorded)}")
        return lines

    def doubts(self, hit_rate: float, ttft_s: float, facts: TraceFacts) -> list[str]:
        """Where simulating the recorded server itself comes to something else than was recorded of it, a line each."""
        lines: list[str] = []
        if not self.options or facts.recorded_hit_rate is None or facts.recorded_ttft_s is None:
            return lines
        if abs(hit_rate - facts.recorded_hit_rate) > _HITS_OFF:
            lines.append(f"hits are {hit_rate:.3f}, and were {facts.recorded_hit_rate:.3f}{_TRUST}")
        if abs(ttft_s - facts.recorded_ttft_s) > _TTFT_OFF * facts.recorded_ttft_s:
            lines.append(f"mean TTFT is {ttft_s:.2f} s, and was {facts.recorded_ttft_s:.2f} s{_TRUST}")
        return lines


def fitted(requests: Sequence[Request], token_bytes: float = 0.0) -> Options:
    """Rates that the requests show. token_bytes: 0 leaves out the rate of loads."""
    rows, seconds = _prompts([each for each in requests if each.ttft_s is not None])
    found = _answers(requests)
    if len(rows) < _LEAST_PROMPTS:
        return found
    sets = _SETS if len(rows) >= _WELL_KNOWN else _SETS_OF_FEW
    latency_s, token_s, attention_s, load_s = _factors(np.array(rows), np.array(seconds), sets)
    if token_s > 0:
        found |= {"prefill_tokens_per_s": 1 / token_s, "attention_s": attention_s, "latency_s": latency_s}
        if load_s > 0 and token_bytes:
            found["ram_gb_per_s"] = token_bytes / load_s / GB
    return found


# -- inside ------------------------------------------------------------------------------------------------------------


def _sizes(server: RecordedServer) -> Options:
    told: Options = {
        "gpu_tokens": (server.gpu_tokens,),
        "step_tokens": server.step_tokens,
        "max_running": server.max_running,
        "kv_bytes": round(server.token_bytes),
    }
    gib = {f"{tier}_gib": (server.tier_bytes.get(tier, 0.0) / GIB,) for tier in _TIERS}
    return gib | {name: value for name, value in told.items() if value not in (0, (0,))}


def _rates(server: RecordedServer) -> Options:
    known = {tier: rate for tier in _TIERS if (rate := server.tier_bytes_per_s.get(tier))}
    prefill = {"prefill_tokens_per_s": server.prefill_tokens_per_s} if server.prefill_tokens_per_s else {}
    return {f"{tier}_gb_per_s": rate / GB for tier, rate in known.items()} | prefill


def _prompts(requests: Iterable[Request]) -> tuple[list[list[float]], list[float]]:
    """Of each step that ended prompts: 1, tokens computed, pairs, tokens found; and the seconds that it took."""
    timed = sorted(((each.at_s + (each.ttft_s or 0.0), each) for each in requests), key=lambda pair: pair[0])
    rows: list[list[float]] = []
    seconds: list[float] = []
    together_s = _TOGETHER * statistics.median(each.ttft_s or 0.0 for _, each in timed) if timed else 0.0
    last_s = float("-inf")
    for first_s, each in timed:
        found = min(each.cached_tokens or 0, each.tokens)
        row = [1.0, float(each.tokens - found), (each.tokens**2 - found**2) / 2, float(found)]
        took_s = first_s - max(each.at_s, last_s)
        if rows and first_s - last_s <= together_s:
            rows[-1] = [1.0, *(a + b for a, b in zip(rows[-1][1:], row[1:], strict=True))]
            seconds[-1] += max(took_s, 0.0)
        elif took_s > 0:
            rows.append(row)
            seconds.append(took_s)
        last_s = first_s
    return rows, seconds


def _answers(requests: Iterable[Request]) -> Options:
    """The time of a step that decodes, as the quarter of the answers shows that shared their steps least."""
    known = sorted(
        (each.took_s - each.ttft_s) / (each.answer_tokens - 1)
        for each in requests
        if each.took_s is not None and each.ttft_s is not None and each.answer_tokens > 1
    )
    known = [each for each in known if each > 0]
    return {"decode_step_s": known[len(known) // 4]} if known else {}


def _factors(
    columns: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], sets: Iterable[Sequence[int]]
) -> list[float]:
    """The factors whose sums are nearest to the seconds, with the first of the sets of columns that needs none below 0.

    The tokens that were computed are in each set: without a rate of theirs nothing can be simulated.
    """
    factors = np.zeros(columns.shape[1])
    for kept in sets:
        factors[:] = 0.0
        factors[list(kept)] = np.linalg.lstsq(columns[:, list(kept)], seconds, rcond=None)[0]
        if factors.min() >= 0 and factors[_COMPUTED] > 0:
            break
    return [float(each) for each in factors]


def _is_same(value: Any, recorded: Any) -> bool:
    """Within a percent: sizes and rates are written in few digits."""
    ours, theirs = _tuple(value), _tuple(recorded)
    return len(ours) == len(theirs) and all(abs(a - b) <= 0.01 * abs(b) for a, b in zip(ours, theirs, strict=True))


def _said(value: Any) -> str:
    return ", ".join(f"{each:.4g}" if isinstance(each, float) else f"{each:,}" for each in _tuple(value))


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
