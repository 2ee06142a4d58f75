"""What is asked: documents at random, conversations that grow, agents. The same for the same seed."""

import json
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, Protocol

from benchmarks.load.rounds import Turn
from benchmarks.real_texts import documents
from hotspan.bench.workloads.base import Message, Prompt

ANSWER_TOKENS: Final = 16
BLOCK_TOKENS: Final = 128
QUESTIONS: Final = (
    "What is its main subject, in one sentence?",
    "Which commands does it name?",
    "Who is it written for?",
    "What does it leave open?",
    "Which of its advice is the most important?",
    "What should be done first?",
    "Which mistake does it warn of?",
    "Which words does it explain?",
)
SHAPES: Final = Path(__file__).parents[1] / "assets" / "agents" / "shapes.json"

_AROUND_TOKENS: Final = 96
"""The chat template, and a question with its number."""
_TURN_TOKENS: Final = 40
"""The template around two messages, and a question."""


class Stretch(NamedTuple):
    """What is asked at one point: `fill` in its order and unmeasured, then `turns`."""

    fill: tuple[Prompt, ...]
    turns: tuple[Turn, ...]


class Workload(Protocol):
    """Requests for one point after the other of a server that is started once.

    request_tokens: the most that a request may have, answer included, in whole blocks. fill_tokens: of the fill's.
    is_thinking:    clients play one session after the other and think between its turns.
    """

    request_tokens: int
    is_thinking: bool

    @property
    def fill_tokens(self) -> int: ...

    def tokens(self, points: int) -> int:
        """At least as many as all texts and answers of so many points have."""
        ...

    def stretch(self, point: int, turns: int, seed: int) -> Stretch:
        """So many turns, for the point of that number."""
        ...


def in_blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_TOKENS


def question(text: str, number: int) -> str:
    return f"{text}\n\nQuestion {number}: {QUESTIONS[number]}"


@dataclass(frozen=True, slots=True)
class Documents:
    """Questions about texts of equal length, each asked about once before the first point."""

    texts: Sequence[str] = field(repr=False)
    request_tokens: int
    popularity: str = "uniform"
    is_thinking: bool = False

    @property
    def fill_tokens(self) -> int:
        return self.request_tokens

    def tokens(self, points: int) -> int:
        """A question has blocks of its own."""
        return 2 * len(self.texts) * self.request_tokens

    def stretch(self, point: int, turns: int, seed: int) -> Stretch:
        fill = [Prompt(f"fill{n}", question(text, 0), ANSWER_TOKENS) for n, text in enumerate(self.texts)]
        rng, asked = Random(f"documents {seed} {point}"), []
        for n, at in enumerate(drawn(rng, turns, len(self.texts), self.popularity)):
            content = question(self.texts[at], int(rng.random() * len(QUESTIONS)))
            asked.append(Turn(Prompt(f"p{point}_{n}_d{at}", content, ANSWER_TOKENS), f"{n}"))
        return Stretch(() if point else tuple(fill), tuple(asked))


def drawn(rng: Random, numbers: int, of: int, popularity: str) -> list[int]:
    """`numbers` numbers below `of`: uniform, or by Zipf's law with exponent 1, its ranks at random places."""
    order = sorted(range(of), key=lambda _: rng.random())
    weights = [1 / (rank + 1) if popularity == "zipf" else 1.0 for rank in range(of)]
    bounds = list(accumulate(weights))
    return [order[bisect(bounds, rng.random() * bounds[-1])] for _ in range(numbers)]


class Passages:
    """Real text of about any length, from pieces of an equal number of tokens."""

    def __init__(self, pieces: Sequence[str], piece_tokens: int, first: int) -> None:
        """first: where in the pieces to begin; after the last comes the first."""
        self._pieces, self._piece_tokens, self._at = pieces, piece_tokens, first

    def next(self, tokens: int) -> str:
        """The text that follows, of `tokens` tokens, of which the last piece's part is estimated by its words."""
        parts = []
        while tokens > 0:
            piece = self._pieces[self._at % len(self._pieces)]
            self._at += 1
            if tokens < self._piece_tokens:
                words = piece.split(" ")
                piece = " ".join(words[: max(1, len(words) * tokens // self._piece_tokens)])
            parts.append(piece)
            tokens -= self._piece_tokens
        return "".join(parts)


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation with fixed replies, so that every system is asked the same."""

    name: str
    passages: Passages
    history: list[Message]

    def ask(self, content: str) -> Prompt:
        """The next prompt. What it asks, and a reply to it, are part of the ones after it."""
        prompt = Prompt(f"{self.name}_{len(self.history)}", content, ANSWER_TOKENS, tuple(self.history))
        reply = Message("assistant", self.passages.next(ANSWER_TOKENS))
        self.history.extend((Message("user", content), reply))
        return prompt


PIECE_TOKENS: Final = 220


@dataclass(frozen=True, slots=True)
class Conversations:
    """Conversations in turn, each with another text, which grow by a passage per turn; new ones at each point."""

    pieces: Sequence[str] = field(repr=False)
    sessions: int = 24
    most_turns: int = 8
    is_thinking: bool = False

    @property
    def request_tokens(self) -> int:
        turn = PIECE_TOKENS + ANSWER_TOKENS + _TURN_TOKENS
        return in_blocks((self.most_turns + 2) * turn + _AROUND_TOKENS)

    @property
    def fill_tokens(self) -> int:
        return in_blocks(2 * PIECE_TOKENS + ANSWER_TOKENS + _AROUND_TOKENS)

    def tokens(self, points: int) -> int:
        """Where a point has more turns than its sessions, it has more sessions: 400 turns have 50."""
        return points * max(self.sessions, 50) * self.request_tokens

    def stretch(self, point: int, turns: int, seed: int) -> Stretch:
        """The first message of each is asked in the fill."""
        number = max(self.sessions, -(-turns // self.most_turns))
        rng = Random(f"conversations {seed} {point}")
        sessions = []
        for n in range(number):
            passages = Passages(self.pieces, PIECE_TOKENS, int(rng.random() * len(self.pieces)))
            sessions.append(Session(f"p{point}_s{n}", passages, []))
        fill = [each.ask(f"Conversation {each.name}.\n{each.passages.next(2 * PIECE_TOKENS)}") for each in sessions]
        asked = []
        for n in range(turns):
            session = sessions[n % number]
            content = question(session.passages.next(PIECE_TOKENS), int(rng.random() * len(QUESTIONS)))
            asked.append(Turn(session.ask(content), session.name))
        return Stretch(tuple(fill), tuple(asked))


@dataclass(frozen=True, slots=True)
class Agents:
    """Sessions of coding agents by recorded shapes: prompts that share their tools, grow, and come after a pause.

    shapes: SHAPES as read.
    """

    pieces: Sequence[str] = field(repr=False)
    shapes: dict[str, Any] = field(repr=False)
    is_thinking: bool = True

    @property
    def request_tokens(self) -> int:
        """The passages are estimated: a tenth is to spare."""
        shapes = self.shapes["sessions"]
        longest = max(sum(tokens for tokens, _ in shape) + _TURN_TOKENS * len(shape) for shape in shapes)
        return in_blocks(longest * 11 // 10 + _AROUND_TOKENS)

    @property
    def fill_tokens(self) -> int:
        return self.request_tokens

    def tokens(self, points: int) -> int:
        """For 400 turns at each, which take fewer than 48 sessions."""
        return points * 48 * self.request_tokens

    def stretch(self, point: int, turns: int, seed: int) -> Stretch:
        """The nth turn of all sessions before the turn after it; nothing is filled."""
        tools = Message("system", Passages(self.pieces, PIECE_TOKENS, 0).next(self.shapes["shared_tokens"]))
        rng, sessions, left = Random(f"agents {seed} {point}"), list[list[Turn]](), turns
        for n in count():
            shape = self.shapes["sessions"][n % len(self.shapes["sessions"])][:left]
            passages = Passages(self.pieces, PIECE_TOKENS, int(rng.random() * len(self.pieces)))
            session = Session(f"p{point}_s{n}", passages, [tools])
            sessions.append([self._turn(session, *each) for each in shape])
            left -= len(shape)
            if not left:
                break
        order = [turn for nth in range(max(map(len, sessions))) for each in sessions for turn in each[nth : nth + 1]]
        return Stretch((), tuple(order))

    def _turn(self, session: Session, tokens: int, think_s: float) -> Turn:
        is_first = len(session.history) == 1
        passage = session.passages.next(tokens - self.shapes["shared_tokens"] if is_first else tokens)
        return Turn(session.ask(f"Task {session.name}.\n{passage}" if is_first else passage), session.name, think_s)


TEXTS, TEXT_TOKENS, PIECES = 60, 880, 240


def make_documents(directory: Path, model: Path, popularity: str) -> Workload:
    request_tokens = in_blocks(TEXT_TOKENS + _AROUND_TOKENS + ANSWER_TOKENS)
    return Documents(documents(directory, model, TEXTS, TEXT_TOKENS), request_tokens, popularity)


def make_conversations(directory: Path, model: Path, popularity: str) -> Workload:
    return Conversations(documents(directory, model, PIECES, PIECE_TOKENS))


def make_agents(directory: Path, model: Path, popularity: str) -> Workload:
    return Agents(documents(directory, model, PIECES, PIECE_TOKENS), json.loads(SHAPES.read_text()))


WORKLOADS: Final[dict[str, Callable[[Path, Path, str], Workload]]] = {
    "documents": make_documents,
    "chat": make_conversations,
    "agents": make_agents,
}
