"""A trace of the shape of Mooncake's synthetic one: documents that many questions are asked about, and short chats.

Published of the real one (Qin and others, FAST '25): 3,993 requests over 1,022 s, 15,325 tokens on average, answered
with 149; 64 % of the blocks asked for were asked for before. It is made of public data sets of chats, of long documents
to summarise, and of documents with several questions each. Nothing is common to all. At each arrival one of the texts
that still have a question is taken at random, so that what is asked about often is nearly all that comes at the end.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from hotspan.core.types import ChunkKey
from hotspan.simulate.mooncake import BLOCK_TOKENS, Lengths, Request, Trace, TraceFacts

_SPAN_S = 1022.0
_LONGEST_TOKENS = 126_195


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
    chunks: tuple[ChunkKey, ...]
    left: int


@dataclass(frozen=True, slots=True)
class Synthetic:
    """What a trace is made after; draws like `hotspan.simulate.mooncake.Shape`."""

    name: str
    published: TraceFacts
    texts: tuple[Texts, ...]

    def draw(self, seed: int, scale: float = 1.0, span: float = 1.0) -> Trace:
        """The trace of one seed, with `scale` of the published rate of requests, over `span` times the time.

        What is longer than the published trace is several of them, one after the other.
        """
        rng, names = random.Random(f"{self.name} {seed}"), count()
        waves = max(1, round(span))
        every_s = _SPAN_S * span / waves
        requests = round(self.published.requests * scale * span)
        found: list[Request] = []
        for wave in range(waves):
            wanted = (requests - len(found)) // (waves - wave)
            found += self._wave(rng, names, wanted, wave * every_s, every_s)
        return Trace(self.name, tuple(found))

    def _wave(
        self, rng: random.Random, names: Iterator[int], requests: int, from_s: float, span_s: float
    ) -> Iterator[Request]:
        left = list(self._texts(rng, names, requests))
        for at_s in sorted(rng.uniform(from_s, from_s + span_s) for _ in range(requests)):
            at = rng.randrange(len(left))
            text = left[at]
            yield _ask(text, at_s, rng, names)
            text.left -= 1
            if not text.left:
                left[at] = left[-1]
                left.pop()

    def _texts(self, rng: random.Random, names: Iterator[int], requests: int) -> Iterator[_Text]:
        """As many texts as it takes for so many questions."""
        shares = [kind.share for kind in self.texts]
        while requests > 0:
            kind = rng.choices(self.texts, shares)[0]
            tokens = min(int(kind.tokens.draw(rng)), _LONGEST_TOKENS)
            chunks = tuple(_key(next(names)) for _ in range(tokens // BLOCK_TOKENS))
            left = min(max(1, round(kind.questions.draw(rng))), requests)
            requests -= left
            yield _Text(kind, tokens, chunks, left)


def _ask(text: _Text, at_s: float, rng: random.Random, names: Iterator[int]) -> Request:
    tokens = max(1, text.tokens + int(text.kind.question.draw(rng)))
    own = tokens // BLOCK_TOKENS - len(text.chunks)
    chunks = text.chunks + tuple(_key(next(names)) for _ in range(own))
    return Request(at_s, tokens, chunks, answer_tokens=max(1, round(text.kind.answer.draw(rng))))


def _key(name: int) -> ChunkKey:
    return ChunkKey(name.to_bytes(8, "big"))


_ONCE = Lengths(1, 0.0)
SYNTHETIC = Synthetic(
    "synthetic",
    TraceFacts(3993, 15_325, 13_000, 0.64),
    (
        Texts(0.46, Lengths(60, 1.3), Lengths(20, 0.5), _ONCE, Lengths(200, 0.8)),
        Texts(0.26, Lengths(16_600, 0.4), Lengths(100, 0.5), _ONCE, Lengths(200, 0.4)),
        Texts(0.28, Lengths(16_600, 0.65), Lengths(110, 0.8), Lengths(3.4, 0.75), Lengths(35, 1.3)),
    ),
)
