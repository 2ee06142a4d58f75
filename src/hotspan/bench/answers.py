"""What a check of answers found (check.py makes it)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AnswerCheck:
    """What the check found.

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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "AnswerCheck":
        """What `to_json` gave."""
        lists = {name: tuple(value[name]) for name in ("different", "failed", "not_anew")}
        return cls(**{**value, **lists})
