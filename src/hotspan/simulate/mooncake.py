"""Request traces of the shape of Mooncake's: made from a seed, after what is published of the real ones.

The traces of Mooncake (Qin and others, FAST '25) are an hour of requests to a chat service and to one for tools and
agents, with the names of their 512-token blocks. Published of them, and what the shapes below aim at:

    conversation  12,031 requests, 12,035 tokens on average (median 6,909), answered with 343; one system prompt of a
                  block; 7,373 texts that begin differently after it, the most popular in 43 requests; 36.6 % of the
                  blocks asked for were asked for before
    toolagent     23,608 requests, 8,596 tokens on average (median 6,346), answered with 182; 46.3 % chat as above,
                  39.0 % on a prompt of 12 blocks, 14.6 % on another of several; 55.3 % of the blocks asked for were
                  asked for before

Times of arrival are written in steps of 3 s, a dozen or two requests at once.

Most sessions ask once; those that go on add a short question, or a document, minutes later. Only whole blocks are
chunks here: a partial block at the end of a text, which Mooncake names too, is never reused.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from hotspan.core.types import ChunkKey

BLOCK_TOKENS = 512
SPAN_S = 3537.0
_BEFORE_S = 3600.0
"""Sessions may have begun this long before the trace: their turns until then are not in it."""
_LONGEST_TOKENS = 126_195


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its text's whole blocks, root first, as chunk keys."""

    at_s: float
    tokens: int
    chunks: tuple[ChunkKey, ...]
    tenant: int = 0
    answer_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of arrival."""

    name: str
    requests: tuple[Request, ...]

    @property
    def tokens(self) -> int:
        """Of all texts together."""
        return sum(request.tokens for request in self.requests)

    def facts(self) -> "TraceFacts":
        """What it is like."""
        asked = Counter(key for request in self.requests for key in request.chunks)
        lengths = sorted(request.tokens for request in self.requests)
        return TraceFacts(
            requests=len(lengths),
            mean_tokens=round(sum(lengths) / len(lengths)),
            median_tokens=lengths[len(lengths) // 2],
            asked_before=1 - len(asked) / asked.total(),
            footprint_chunks=len(asked),
            reused=sum(times > 1 for times in asked.values()) / len(asked),
        )


@dataclass(frozen=True, slots=True)
class TraceFacts:
    """What a trace is like.

    asked_before:     of the chunks that requests ask for.
    footprint_chunks: different chunks; None where it is not published for whole blocks.
    reused:           of the footprint, what is asked for more than once.
    """

    requests: int
    mean_tokens: int
    median_tokens: int
    asked_before: float
    footprint_chunks: int | None = None
    reused: float | None = None


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution: tokens, or seconds."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        return self.median * rng.lognormvariate(0.0, self.sigma)


@dataclass(frozen=True, slots=True)
class Sessions:
    """One kind of session.

    share:         of the trace's requests.
    prompt:        which of the shape's system prompts all sessions of the kind share.
    first:         tokens of the first question, and what comes with it.
    goes_on:       of Beta(a, b) is drawn how likely a session goes on after each turn; None: one turn each.
    answer:        what a turn adds besides a document.
    answers:       what a turn is answered with, one of these.
    document:      what `document_share` of the later questions bring along.
    gap_s:         from turn to turn.
    """

    share: float
    prompt: int
    first: Lengths
    goes_on: tuple[float, float] | None = None
    answer: Lengths = Lengths(280, 0.7)
    document: Lengths = Lengths(3500, 0.9)
    document_share: float = 0.14
    gap_s: Lengths = Lengths(144, 1.18)
    answers: tuple[Lengths, ...] = (Lengths(368, 0.5),) * 4 + (Lengths(25, 1.2),)

    def draw(
        self, rng: random.Random, names: Iterator[int], prompt: tuple[ChunkKey, ...], span_s: float = SPAN_S
    ) -> Iterator[Request]:
        """The requests of one session, which may begin before the trace and end after it."""
        own: list[ChunkKey] = []
        at_s = rng.uniform(-_BEFORE_S, span_s)
        tokens = self.first.draw(rng)
        again = rng.betavariate(*self.goes_on) if self.goes_on else 0.0
        while at_s < span_s:
            tokens = min(tokens, _LONGEST_TOKENS - len(prompt) * BLOCK_TOKENS)
            while len(own) < int(tokens) // BLOCK_TOKENS:
                own.append(_key(next(names)))
            yield Request(at_s, len(prompt) * BLOCK_TOKENS + int(tokens), (*prompt, *own))
            if rng.random() >= again:
                break
            at_s += self.gap_s.draw(rng)
            tokens += self.answer.draw(rng)
            if rng.random() < self.document_share:
                tokens += self.document.draw(rng)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a trace is made after.

    published: of the real trace.
    prompts:   blocks of each system prompt.
    tick_s:    arrivals are written down in steps of this.
    """

    name: str
    published: TraceFacts
    prompts: tuple[int, ...]
    sessions: tuple[Sessions, ...]
    tick_s: float = 3.0

    def draw(self, seed: int, scale: float = 1.0, span: float = 1.0) -> Trace:
        """The trace of one seed, with `scale` of the published number of requests an hour, over `span` hours."""
        rng, names = random.Random(f"{self.name} {seed}"), count()
        requests: list[tuple[Request, Sessions]] = []
        prompts = [tuple(_key(next(names)) for _ in range(blocks)) for blocks in self.prompts]
        for sessions in self.sessions:
            wanted, drawn = round(self.published.requests * scale * span * sessions.share), 0
            while drawn < wanted:
                for request in sessions.draw(rng, names, prompts[sessions.prompt], SPAN_S * span):
                    if request.at_s >= 0 and drawn < wanted:
                        requests.append((request, sessions))
                        drawn += 1
        requests.sort(key=lambda drawn: drawn[0].at_s)
        answers = random.Random(f"{self.name} {seed} answers")  # of their own: texts don't depend on them
        return Trace(self.name, tuple(self._answered(*drawn, answers) for drawn in requests))

    def _answered(self, request: Request, sessions: Sessions, rng: random.Random) -> Request:
        tokens = max(1, round(rng.choice(sessions.answers).draw(rng)))
        return replace(request, at_s=request.at_s // self.tick_s * self.tick_s, answer_tokens=tokens)


def _key(name: int) -> ChunkKey:
    return ChunkKey(name.to_bytes(8, "big"))


_CHAT = (
    Sessions(0.225, 0, Lengths(2650, 0.2), goes_on=(3.7, 2.2)),
    Sessions(0.775, 0, Lengths(6700, 1.15), goes_on=(1.1, 3.3)),
)
CONVERSATION = Shape("conversation", TraceFacts(12_031, 12_035, 6_909, 0.366), (1,), _CHAT)
TOOLAGENT = Shape(
    "toolagent",
    TraceFacts(23_608, 8_596, 6_346, 0.553),
    (1, 12, 6),
    (
        *(replace(sessions, share=0.463 * sessions.share) for sessions in _CHAT),
        Sessions(0.390, 1, Lengths(400, 0.5), answers=(Lengths(30, 0.85),)),
        Sessions(0.147, 2, Lengths(400, 0.5), answers=(Lengths(30, 0.85),)),
    ),
)
SHAPES = (CONVERSATION, TOOLAGENT)
