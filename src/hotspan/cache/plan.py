"""What was chosen for one request, and how far that has come."""

from collections.abc import Sequence
from dataclasses import dataclass

from hotspan.cache.choice import Choice
from hotspan.core.types import Chunk, ChunkKey


@dataclass(slots=True, eq=False)
class Plan:
    """One request's.

    chain:    its chunks, from the first that the engine has not whole. refused: those that it does not wait for.
    began_s:  when it began to wait, for answers included. chosen_s: when all answers were there. Monotonic.
    risked:   it waited for answers longer than the bound allows. answered: all came.
    landed:   how many chunks from the front of the chain are in RAM. landed_s: since when.
    ended_s:  when its wait was over; None while it goes on.
    is_crowded: RAM had no room for some of it: nothing that a tier could be blamed for.
    """

    choice: Choice
    chain: Sequence[Chunk]
    refused: frozenset[ChunkKey]
    began_s: float
    chosen_s: float
    risked: bool
    answered: bool
    landed: int = 0
    landed_s: float = 0.0
    ended_s: float | None = None
    is_crowded: bool = False

    def is_late(self, now_s: float) -> bool:
        """Whether it has waited as long as it may."""
        since_s = self.chosen_s if self.risked else self.began_s
        return now_s - since_s > self.choice.patience_s(self.landed, max(0.0, self.landed_s - since_s))
