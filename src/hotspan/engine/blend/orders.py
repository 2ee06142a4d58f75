"""What the scheduler and the worker of one engine send each other about blending, in each step; plain data."""

from dataclasses import dataclass, field

from hotspan.core.types import ChunkKey
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.selectors import Selector
from hotspan.engine.blend.windows import Tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stored window in a prompt.

    run:   where it is in the prompt.
    slot:  of the RAM slab, that has the window.
    skip:  tokens of the window before the part.
    shift: how many positions the keys are rotated by: they are stored as at position 0.
    """

    run: Run
    slot: int
    skip: int
    shift: int


@dataclass(frozen=True, slots=True)
class Selection:
    """A selector, and the share of the reused tokens that it chooses.

    check_layer: up to which all tokens are computed before it chooses, at least 1.
    """

    selector: Selector
    ratio: float
    check_layer: int = 1

    @property
    def needs_probe(self) -> bool:
        """Whether choosing takes forwards of its own."""
        return self.selector is not Selector.FIRST_K and self.ratio > 0


@dataclass(frozen=True, slots=True)
class BlendJob:
    """One request to blend.

    tokens:   of its prompt.
    blocks:   of the engine's KV cache, from the first token on.
    pieces:   what is loaded, from left to right.
    computed: what is computed then, from left to right; and what the selection chooses, if one needs a probe.
    is_checked: keep what it says of the first token, for a check.
    """

    number: int
    request_id: str
    tokens: Tokens
    blocks: list[int]
    pieces: list[Piece]
    computed: list[Run]
    is_checked: bool = False
    selection: Selection | None = None


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A window to store, once the step is computed: the tokens of a running request from `start` on."""

    key: ChunkKey
    request_id: str
    start: int
    slot: int


@dataclass(frozen=True, slots=True)
class CheckJob:
    """A prompt that was blended, to be computed in full in other blocks, and compared. number: of its blend."""

    number: int
    tokens: Tokens
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class Checked:
    """What a check found, of the first token of the answer.

    agrees: the same token is the most likely one.
    kl:     what the blend's distribution lost of that of the full prefill, in nats.
    """

    agrees: bool
    kl: float


@dataclass(frozen=True, slots=True)
class Orders:
    """What a worker does in one step.

    budget:    tokens at most to compute in blends. check_budget: in checks.
    cancelled: jobs whose requests ended, and those whose checks are not wanted.
    number:    of these orders; later ones have a higher one.
    """

    budget: int
    blends: list[BlendJob] = field(default_factory=list)
    stores: list[StoreJob] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    checks: list[CheckJob] = field(default_factory=list)
    check_budget: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Measured seconds: to compute a token, and to load and rotate one. layers: of the model."""

    token_s: float
    move_s: float
    layers: int = 0


@dataclass(slots=True)
class Report:
    """What a worker did since its last report.

    speed:    once, of a worker that can blend. off: once, why a worker can't.
    ended:    blends that are complete, failed or cancelled. failed: those that failed.
    selected: by number of a blend, how many of its reused tokens its selection chose.
    stored:   windows that are in their slots. unstored: those that failed.
    checked:  by number, checks that ended; None for one that was cancelled or failed.
    done:     the number of the last orders that were carried out, -1 for none. running: blends and checks that had not
              ended then. Of all else that was ordered up to there, no later report has anything.
    """

    speed: Speed | None = None
    off: str | None = None
    ended: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    selected: dict[int, int] = field(default_factory=dict)
    stored: list[ChunkKey] = field(default_factory=list)
    unstored: list[ChunkKey] = field(default_factory=list)
    checked: dict[int, Checked | None] = field(default_factory=dict)
    seconds: float = 0.0
    done: int = -1
    running: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return self != Report()

    def joined(self, other: "Report") -> "Report":
        """Of two tensor-parallel workers, of the same steps: what both have done, and what either could not."""
        speeds = [each for each in (self.speed, other.speed) if each is not None]
        unstored = list(dict.fromkeys([*self.unstored, *other.unstored]))
        return Report(
            speed=max(speeds, key=lambda speed: speed.token_s, default=None),
            off=self.off or other.off,
            ended=self.ended or other.ended,
            failed=self.failed or other.failed,
            selected=self.selected or other.selected,
            stored=[key for key in self.stored or other.stored if key not in unstored],
            unstored=unstored,
            checked=self.checked or other.checked,
            seconds=max(self.seconds, other.seconds),
            done=min(self.done, other.done),
            running=self.running or other.running,
        )
