"""How many documents of which length the demo can afford: from what the engine's prefill costs on this machine."""

import json
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from hotspan.bench.prose import prose
from hotspan.core.errors import EngineError
from hotspan.demo.plan import DemoSizes
from hotspan.http.local import open_url

BUDGET_S: Final = 400.0
"""For all modes and the measuring before them, their servers' starts and stops included."""

MIN_COMPUTE_S: Final = 90.0
"""Where the starts take most of the budget, it is exceeded by so much at most."""

STOP_S: Final = 5.0
"""A server's stop, and the waiting for what it still does in the background after a round."""

_LENGTHS: Final = (8192, 7680, 6144, 4096, 3072, 2048, 1536, 1024, 512)
_DOCUMENTS: Final = (6, 4)
"""Fewer only where even short ones take too long: the engine's own pool would hold too many of them."""

_STEPS: Final = (512, 1024, 2048, 4096)
"""Tokens of the prompts that are measured, as long as that takes seconds."""

_OUTPUTS: Final = (1, 2, 4)
"""By what answers are shortened where they take more than a third of the time."""

_ENOUGH_S: Final = 6.0
_WORDS_PER_TOKEN: Final = 0.7
_PROBE_OUTPUT: Final = 8
_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt of so many tokens took so long to compute, and each token of its answer `token_s`."""

    tokens: int
    prefill_s: float
    token_s: float


@dataclass(frozen=True, slots=True)
class Costs:
    """What things take on this machine, in seconds.

    start_s:         a server's start, until it answers.
    linear, quadratic: a prompt of n tokens takes linear * n + quadratic * n * n.
    """

    start_s: float
    linear: float
    quadratic: float
    token_s: float

    @classmethod
    def of(cls, start_s: float, samples: Sequence[Sample]) -> "Costs":
        """Fitted to the longest prompt that was measured and to one of half its length, or less."""
        last = samples[-1]
        rate = last.prefill_s / last.tokens
        token_s = min(sample.token_s for sample in samples)
        if len(samples) == 1:
            return cls(start_s, rate, 0.0, token_s)
        before = samples[-2]
        slope = (rate - before.prefill_s / before.tokens) / (last.tokens - before.tokens)
        quadratic = max(0.0, slope)
        return cls(start_s, max(0.0, rate - quadratic * last.tokens), quadratic, token_s)

    def prefill_s(self, tokens: int) -> float:
        """To compute a prompt."""
        return self.linear * tokens + self.quadratic * tokens * tokens


_COMPUTED: Final = {"none": (1, 1), "ram": (1, 0), "disk": (1, 0), "restart": (0, 0), "bound": (1, 0)}
"""How often a mode computes each document: in its warm-up round, and for each question."""

_ROUNDS: Final = 2
"""In which each question is asked: timed, and checked."""


def compute_s(sizes: DemoSizes, costs: Costs, modes: Sequence[str]) -> float:
    """What the modes take besides starting their servers."""
    prefills = sum(once + each * sizes.queries_per_document for once, each in map(_COMPUTED.__getitem__, modes))
    prefills_s = sizes.documents * prefills * costs.prefill_s(sizes.document_tokens)
    return prefills_s + _answers_s(sizes, costs, modes)


def fit(
    sizes: DemoSizes, costs: Costs, modes: Sequence[str], repetitions: int = 1, max_tokens: int | None = None
) -> DemoSizes:
    """`sizes` with as many documents as the budget allows, as long as it and the model allow.

    The smallest are taken where none fit.
    max_tokens: of a request.
    """
    once_s = (len(modes) + 1) * (costs.start_s + STOP_S)
    budget_s = max(BUDGET_S / repetitions - once_s, MIN_COMPUTE_S / repetitions)
    sizes = _answers_fitted(sizes, costs, modes, budget_s / 3)
    for documents in _DOCUMENTS:
        if documents <= sizes.in_flight:
            continue
        for tokens in _LENGTHS:
            tried = replace(sizes, documents=documents, document_tokens=tokens)
            if max_tokens and tried.request_tokens > max_tokens:
                continue
            if compute_s(tried, costs, modes) <= budget_s:
                return tried
    return tried


def largest(sizes: DemoSizes, max_tokens: int) -> DemoSizes:
    """`sizes` with documents as long as a model takes that reads so many tokens."""
    fitting = [replace(sizes, document_tokens=tokens) for tokens in _LENGTHS if tokens <= sizes.document_tokens]
    return next((tried for tried in fitting if tried.request_tokens <= max_tokens), sizes)


def _answers_fitted(sizes: DemoSizes, costs: Costs, modes: Sequence[str], budget_s: float) -> DemoSizes:
    """With answers short enough for the budget, as far as they are shortened."""
    for factor in _OUTPUTS:
        shorter = replace(sizes, output_tokens=max(1, sizes.output_tokens // factor))
        if _answers_s(shorter, costs, modes) <= budget_s:
            break
    return shorter


def _answers_s(sizes: DemoSizes, costs: Costs, modes: Sequence[str]) -> float:
    questions = len(modes) * _ROUNDS * sizes.documents * sizes.queries_per_document
    return questions * sizes.output_tokens * costs.token_s


def measure(url: str, max_tokens: int, clock: Callable[[], float] = time.monotonic) -> list[Sample]:
    """What prompts of growing length take at a server, as far as that can be told in seconds.

    Raises: EngineError if it does not answer them.
    """
    _ask(url, prose(900, 40), 1)  # what is compiled at the first request
    samples: list[Sample] = []
    for number, tokens in enumerate(each for each in _STEPS if each <= max_tokens):
        text = prose(901 + number, int(tokens * _WORDS_PER_TOKEN))
        began_s = clock()
        counted = _ask(url, text, 1)
        middle_s = clock()
        _ask(url, text, 1 + _PROBE_OUTPUT)  # its prompt is a hit of the engine's own cache
        took_s = middle_s - began_s
        samples.append(Sample(max(1, counted), took_s, max(0.0, clock() - middle_s) / (1 + _PROBE_OUTPUT)))
        if took_s > _ENOUGH_S / 3:
            break
    return samples


def _ask(url: str, text: str, tokens: int) -> int:
    """The tokens of a prompt that was answered."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with open_url(request, _TIMEOUT_S) as response:
            answer: dict[str, Any] = json.load(response)
        return int(answer["usage"]["prompt_tokens"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"the server did not answer what measures its prefill rate ({error})") from error
