"""Traces of the shape of Mooncake's, made from a seed after what is published of the real ones (FAST '25).

    conversation  an hour of a chat service: one system prompt of a block; 7,373 texts that begin differently after it
    toolagent     an hour of tools and agents: 46.3 % chat as above, 39.0 % on a prompt of 12 blocks, 14.6 % on another
    synthetic     17 minutes of public data sets: chats, long documents to summarise, documents with several questions

    documents     RAG: a system prompt, some documents in any order, a question; nothing is published of it

`TraceFacts` below are the published figures. Most sessions ask once; those that go on add a short question, or a
document, minutes later. Only whole blocks are chunks: a partial block at the end of a text is never reused.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import ClassVar

from hotspan.core.errors import ConfigError
from hotspan.core.trace import BLOCK_TOKENS, Request, Section, Trace, TraceFacts, read

_HOUR_S = 3537.0
_BEFORE_S = 3600.0
"""Sessions may have begun this long before the trace: their turns until then are not in it."""
_MAX_TEXT = 126_195
_TICK_S = 3.0
"""Sessions' times of arrival are written in steps of this, a dozen or two requests at once."""

Keys = Iterator[int]
"""Keys of new blocks."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A log-normal distribution: tokens, seconds, or questions."""

    median: float
    sigma: float

    def draw(self, rng: random.Random) -> float:
        return self.median * rng.lognormvariate(0.0, self.sigma)

    def whole(self, rng: random.Random) -> int:
        """At least 1."""
        return max(1, round(self.draw(rng)))


@dataclass(frozen=True, slots=True)
class Shape:
    """A kind of trace. `published`: of the real one. A subclass draws its requests.

    IS_PUBLISHED: there is a real one; else `published` says how many requests there are in which time.
    """

    IS_PUBLISHED: ClassVar[bool] = True
    name: str
    published: TraceFacts

    def draw(self, seed: int, requests: int | None = None, *, scale: float = 1.0) -> Trace:
        """The trace of one seed.

        requests: at the published rate, over longer or less time; None: as many as published.
        scale:    of that number, over the same time.
        """
        span = 1.0 if requests is None else requests / self.published.requests
        names: dict[int, int] = {}
        found = []
        for each in self._requests(seed, self.published.requests * scale * span, span):
            found.append(each._replace(keys=tuple(names.setdefault(key, len(names)) for key in each.keys)))
        partials = count(len(names))
        whole = (each._replace(partial=next(partials)) if each.tokens % BLOCK_TOKENS else each for each in found)
        return Trace.of(self.name, list(whole))

    def _requests(self, seed: int, requests: float, span: float) -> Iterator[Request]:
        """About so many in the order of arrival, over `span` times the published time."""
        raise NotImplementedError


# -- sessions --------------------------------------------------------------------------------------------------------


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

    def draw(self, rng: random.Random, keys: Keys, prompt: tuple[int, ...], span_s: float) -> Iterator[Request]:
        """The requests of one session, which may begin before the trace and end after it."""
        own: list[int] = []
        at_s = rng.uniform(-_BEFORE_S, span_s)
        tokens = self.first.draw(rng)
        again = rng.betavariate(*self.goes_on) if self.goes_on else 0.0
        while at_s < span_s:
            tokens = min(tokens, _MAX_TEXT - len(prompt) * BLOCK_TOKENS)
            while len(own) < int(tokens) // BLOCK_TOKENS:
                own.append(next(keys))
            yield Request(at_s, len(prompt) * BLOCK_TOKENS + int(tokens), 0, (*prompt, *own))
            if rng.random() >= again:
                break
            at_s += self.gap_s.draw(rng)
            tokens += self.answer.draw(rng)
            if rng.random() < self.document_share:
                tokens += self.document.draw(rng)


@dataclass(frozen=True, slots=True)
class SessionTrace(Shape):
    """Sessions of several kinds. prompts: blocks of each system prompt."""

    prompts: tuple[int, ...]
    kinds: tuple[Sessions, ...]

    def _requests(self, seed: int, requests: float, span: float) -> Iterator[Request]:
        rng, keys = random.Random(f"{self.name} {seed}"), count()
        found: list[tuple[Request, Sessions]] = []
        prompts = [tuple(next(keys) for _ in range(blocks)) for blocks in self.prompts]
        for kind in self.kinds:
            wanted, drawn = round(requests * kind.share), 0
            while drawn < wanted:
                for each in kind.draw(rng, keys, prompts[kind.prompt], _HOUR_S * span):
                    if each.at_s >= 0 and drawn < wanted:
                        found.append((each, kind))
                        drawn += 1
        found.sort(key=lambda pair: pair[0].at_s)
        answers = random.Random(f"{self.name} {seed} answers")  # of their own: texts don't depend on them
        for each, kind in found:
            tokens = answers.choice(kind.answers).whole(answers)
            yield each._replace(at_s=each.at_s // _TICK_S * _TICK_S, answer_tokens=tokens)


# -- texts with questions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Texts:
    """One kind of text.

    share:     of all texts.
    tokens:    of the text itself; `question`: of what is asked about it.
    questions: about each text, at least one.
    """

    share: float
    tokens: Lengths
    question: Lengths
    questions: Lengths
    answer: Lengths


@dataclass(slots=True)
class _Text:
    kind: Texts
    tokens: int
    keys: tuple[int, ...]
    left: int


@dataclass(frozen=True, slots=True)
class TextTrace(Shape):
    """Texts of several kinds, each asked about some times. Nothing is common to all.

    At each arrival one of the texts that still have a question is taken at random. What is longer than the published
    time is several traces, one after the other.
    """

    kinds: tuple[Texts, ...]

    def _requests(self, seed: int, requests: float, span: float) -> Iterator[Request]:
        rng, keys = random.Random(f"{self.name} {seed}"), count()
        waves = max(1, round(span))
        every_s = self.published.span_s * span / waves
        left = round(requests)
        for wave in range(waves):
            wanted = left // (waves - wave)
            left -= wanted
            yield from self._wave(rng, keys, wanted, wave * every_s, every_s)

    def _wave(self, rng: random.Random, keys: Keys, requests: int, from_s: float, span_s: float) -> Iterator[Request]:
        left = list(self._texts(rng, keys, requests))
        for at_s in sorted(rng.uniform(from_s, from_s + span_s) for _ in range(requests)):
            at = rng.randrange(len(left))
            text = left[at]
            tokens = max(1, text.tokens + int(text.kind.question.draw(rng)))
            own = (next(keys) for _ in range(tokens // BLOCK_TOKENS - len(text.keys)))
            blocks = (*text.keys, *own)
            yield Request(at_s, tokens, text.kind.answer.whole(rng), blocks)
            text.left -= 1
            if not text.left:
                left[at] = left[-1]
                left.pop()

    def _texts(self, rng: random.Random, keys: Keys, requests: int) -> Iterator[_Text]:
        """As many texts as it takes for so many questions."""
        shares = [kind.share for kind in self.kinds]
        while requests > 0:
            kind = rng.choices(self.kinds, shares)[0]
            tokens = min(int(kind.tokens.draw(rng)), _MAX_TEXT)
            blocks = tuple(next(keys) for _ in range(tokens // BLOCK_TOKENS))
            left = min(kind.questions.whole(rng), requests)
            requests -= left
            yield _Text(kind, tokens, blocks, left)


# -- documents in any order ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DocumentTrace(Shape):
    """Questions about some of many documents, in any order behind one system prompt; arrivals at random.

    documents: that there are; `asked`: of them in each prompt. Those of a lower number are asked for more often.
    popularity: a document's share falls with its number to the power of this; 0: all alike.
    document, question, answer: tokens of each; `system`: of the system prompt.
    """

    IS_PUBLISHED: ClassVar[bool] = False
    documents: int = 200
    asked: int = 5
    popularity: float = 0.8
    system: int = 1000
    document: Lengths = Lengths(2000, 0.4)
    question: Lengths = Lengths(40, 0.5)
    answer: Lengths = Lengths(150, 0.6)

    def _requests(self, seed: int, requests: float, span: float) -> Iterator[Request]:
        rng = random.Random(f"{self.name} {seed}")
        tokens = [self.document.whole(rng) for _ in range(self.documents)]
        weights = [1 / (number + 1) ** self.popularity for number in range(self.documents)]
        times = sorted(rng.uniform(0.0, self.published.span_s * span) for _ in range(round(requests)))
        orders = (self._order(rng, weights) for _ in times)
        questions = (self.question.whole(rng) for _ in times)
        for each in permuted(self.system, tokens, zip(times, orders, questions, strict=True)):
            yield each._replace(answer_tokens=self.answer.whole(rng))

    def _order(self, rng: random.Random, weights: Sequence[float]) -> tuple[int, ...]:
        chosen: dict[int, None] = {}
        while len(chosen) < min(self.asked, self.documents):
            chosen[rng.choices(range(self.documents), weights)[0]] = None
        order = list(chosen)
        rng.shuffle(order)
        return tuple(order)


def permuted(
    system: int,
    tokens: Sequence[int],
    asked: Iterable[tuple[float, tuple[int, ...], int]],
    block_tokens: int = BLOCK_TOKENS,
) -> Iterator[Request]:
    """Prompts of a system prompt, documents in an order, and a question. Each answer has one token.

    tokens: of each document. asked: when, the documents' numbers, and the tokens of the question.
    Sections are the system prompt, 0, and each document, its number and 1 more.
    """
    names: dict[tuple[object, ...], int] = {}
    for number, (at_s, order, question) in enumerate(asked):
        sections, at = [Section(0, 0, system)] if system else [], system
        for document in order:
            sections.append(Section(document + 1, at, at + tokens[document]))
            at = sections[-1].stop
        stops = [*range(block_tokens, at + question + 1, block_tokens)]
        # A block is named by all that begins before its end.
        blocks = [
            (stop, *(each.key for each in sections if each.start < stop), number if stop > at else None)
            for stop in stops
        ]
        keys = tuple(names.setdefault(block, len(names)) for block in blocks)
        yield Request(at_s, at + question, 1, keys, sections=tuple(sections))


_CHAT = (
    Sessions(0.225, 0, Lengths(2650, 0.2), goes_on=(3.7, 2.2)),
    Sessions(0.775, 0, Lengths(6700, 1.15), goes_on=(1.1, 3.3)),
)
_ONCE = Lengths(1, 0.0)
CONVERSATION = SessionTrace("conversation", TraceFacts(12_031, 12_035, 6_909, 0.366, _HOUR_S, 343), (1,), _CHAT)
TOOLAGENT = SessionTrace(
    "toolagent",
    TraceFacts(23_608, 8_596, 6_346, 0.553, _HOUR_S, 182),
    (1, 12, 6),
    (
        *(replace(kind, share=0.463 * kind.share) for kind in _CHAT),
        Sessions(0.390, 1, Lengths(400, 0.5), answers=(Lengths(30, 0.85),)),
        Sessions(0.147, 2, Lengths(400, 0.5), answers=(Lengths(30, 0.85),)),
    ),
)
SYNTHETIC = TextTrace(
    "synthetic",
    TraceFacts(3993, 15_325, 13_000, 0.64, 1022.0, 149),
    (
        Texts(0.46, Lengths(60, 1.3), Lengths(20, 0.5), _ONCE, Lengths(200, 0.8)),
        Texts(0.26, Lengths(16_600, 0.4), Lengths(100, 0.5), _ONCE, Lengths(200, 0.4)),
        Texts(0.28, Lengths(16_600, 0.65), Lengths(110, 0.8), Lengths(3.4, 0.75), Lengths(35, 1.3)),
    ),
)
DOCUMENTS = DocumentTrace("documents", TraceFacts(6000, 11_850, 11_700, 0.29, 2000.0, 180))
SHAPES: dict[str, Shape] = {shape.name: shape for shape in (CONVERSATION, SYNTHETIC, TOOLAGENT, DOCUMENTS)}


def sources(
    names: Sequence[str], requests: int | None = None, rate_scale: float = 1.0
) -> dict[str, Callable[[int], Trace]]:
    """For each trace, a shape's name or a file, what gives the trace of a seed; a file is read once, and now.

    Raises: ConfigError for a name that is neither, or a file that has an error.
    """
    found: dict[str, Callable[[int], Trace]] = {}
    for name in names:
        if name in SHAPES:
            found[name] = partial(_drawn, SHAPES[name], requests, rate_scale)
        elif Path(name).exists():
            found[name] = partial(_same, read(Path(name), requests).faster(rate_scale))
        else:
            raise ConfigError(f"there is no trace {name}: give one of {', '.join(SHAPES)}, or a file")
    return found


def _drawn(shape: Shape, requests: int | None, rate_scale: float, seed: int) -> Trace:
    return shape.draw(seed, requests).faster(rate_scale)


def _same(trace: Trace, seed: int) -> Trace:
    return trace
