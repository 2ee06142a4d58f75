"""What comparisons of answers say of a candidate's drift, at any time."""

import math

_ALPHA = 0.05
"""Probability that a candidate without a drift above the limit is ever rolled back."""

_BETS = tuple((at + 0.5) / 12 for at in range(12))


class Evidence:
    """What comparisons say of a drift, at any time, however often it is asked.

    The drift is the expected value of D: 1 if the candidate differs and the control does not, -1 the other way round,
    else 0. Against "the drift is at most m" a bettor starts with 1 and multiplies it by 1 + b (D - m) at each
    comparison, for a fixed share b of 1 / (1 + m); the mean over several b is the wealth. If the drift is at most m,
    the wealth ever reaches 1 / alpha with a probability of at most alpha (Ville's inequality).
    """

    def __init__(self) -> None:
        self.worse = self.equal = self.better = self.different = self.noise = 0

    def note(self, *, differs: bool, control_differs: bool) -> None:
        """One comparison: whether the candidate's answer, and the same replica's second one, differ from the first."""
        self.different += differs
        self.noise += control_differs
        self.worse += differs and not control_differs
        self.better += control_differs and not differs
        self.equal += differs == control_differs

    @property
    def compared(self) -> int:
        return self.worse + self.equal + self.better

    @property
    def drift(self) -> float:
        """The estimate; 0 without comparisons."""
        return (self.worse - self.better) / self.compared if self.compared else 0.0

    @property
    def low(self) -> float:
        """The lower limit of the drift: with a probability of 95 % it is never above the drift, at no time."""
        low, high = -1.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.is_above(middle) else (low, middle)
        return low

    def is_above(self, limit: float) -> bool:
        """Whether the drift is above a limit, as far as can be told so far."""
        gains = [
            self.worse * math.log1p(bet * (1 - limit) / (1 + limit))
            + self.equal * math.log1p(-bet * limit / (1 + limit))
            + self.better * math.log1p(-bet)
            for bet in (_BETS if limit > -1 else ())
        ]
        most = max(gains, default=math.inf)
        return not gains or most + math.log(sum(math.exp(gain - most) for gain in gains) / len(gains)) >= -math.log(
            _ALPHA
        )
