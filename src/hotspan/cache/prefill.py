"""How long the engine takes to compute a text, learnt from its steps."""

from typing import Any

import numpy as np
import numpy.typing as npt

from hotspan.cache.fit import Accuracy, Fit

Tokens = int | npt.NDArray[np.int64]

_PRIOR = (256.0, 1.0, 1 / 30_000)
"""Before anything is known: a step costs as much as 256 tokens, and a token that attends to 30,000 twice what the first
costs (a layer's attention does 4 d FLOP a token of context, all else in it about 24 d^2, with d = 4096 to 5120)."""

_DOUBTS = 4
"""Slow steps in a row until they are believed: compilation and preemption come in twos and threes."""

_LEAST_STEPS = 3


class Prefill:
    """Seconds = a x steps + b x tokens + c x the tokens that each of them attends to.

    step_tokens: the most tokens that the engine computes in one step.
    """

    def __init__(self, step_tokens: int) -> None:
        if step_tokens < 1:
            raise ValueError(f"an engine computes at least one token a step, not {step_tokens}")
        self._step_tokens = step_tokens
        self.fit = Fit(_PRIOR, _DOUBTS)
        self.accuracy = Accuracy()

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to say anything."""
        return self.fit.count >= _LEAST_STEPS

    def observe_step(self, tokens: int, context_tokens: int, seconds: float) -> None:
        """One step took so long: `tokens` of prompts, which attended to `context_tokens` before them in sum."""
        amounts = (1.0, float(tokens), float(context_tokens))
        if tokens <= 0:
            return
        if self.is_known and self.fit.can_observe(amounts, seconds):
            self.accuracy = self.accuracy.after(self.fit.predict(amounts), seconds)
        self.fit.observe(amounts, seconds)

    def seconds(self, start: Tokens, stop: int) -> Any:
        """To compute the tokens [start, stop) of a text, for a number or an array of starts; 0 while unknown."""
        return sum(rate * amount for rate, amount in zip(self.fit.rates, self._amounts(start, stop), strict=True))

    def factor(self, start: int, stop: int) -> float:
        """How far off that typically is, either way."""
        return self.fit.factor_for([float(amount) for amount in self._amounts(start, stop)])

    def _amounts(self, start: Tokens, stop: int) -> tuple[Any, Any, Any]:
        tokens = np.maximum(stop - np.asarray(start, np.float64), 0.0)
        attended = np.maximum(tokens * (2.0 * stop - tokens - 1.0) / 2, 0.0)
        return np.ceil(tokens / self._step_tokens), tokens, attended
