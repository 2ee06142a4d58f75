"""What the scheduler and the worker of one engine send each other about blending, in each step; plain data."""

from dataclasses import dataclass, field

from hotspan.core.types import ChunkKey
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.windows import Tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stored window in a prompt.

    run:   where it is in the prompt.
    slot:  of the RAM slab, that has the window.
    skip:  tokens of the window before the part.
    shift: how many positions the keys are rotated by.
    """

    run: Run
    slot: int
    skip: int
    shift: int


@dataclass(frozen=True, slots=True)
class BlendJob:
    """One request to blend.

    tokens:   of its prompt.
    blocks:   of the engine's KV cache, from the first token on.
    pieces:   what is loaded, from left to right.
    computed: what is computed then, from left to right.
    """

    number: int
    request_id: str
    tokens: Tokens
    blocks: list[int]
    pieces: list[Piece]
    computed: list[Run]


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A window to store, once the step is computed: the tokens of a running request from `start` on."""

    key: ChunkKey
    request_id: str
    start: int
    slot: int


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker does in one step.

    budget:    tokens at most to compute in blends.
    cancelled: jobs whose requests ended.
    """

    budget: int
    blends: list[BlendJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured seconds: to compute a token, and to load and rotate one."""

    token_s: float
    move_s: float


@dataclass(slots=True)
class Report:
    """What a worker did since its last report.

    speed:    once, of a worker that can blend. off: once, why a worker can't.
    ended:    blends that are complete, failed or cancelled. failed: those that failed.
    stored:   windows that are in their slots. unstored: those that failed.
    """

    speed: Speed | None = None
    off: str | None = None
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    stored: list[ChunkKey] = field(default_factory=list)
    unstored: list[ChunkKey] = field(default_factory=list)
    seconds: float = 0.0

    def __bool__(self) -> bool:
        return self != Report()
