"""What requests are made of: prose of an exact length in the server's own tokens, and texts to get it warm."""

import re
from collections.abc import Callable
from hashlib import shake_128
from typing import Final

from hotspan.bench.prose import prose
from hotspan.bench.workloads.base import CountTokens, Prompt

_MAX_COUNTS: Final = 10
_SAMPLE_WORDS: Final = 1000
_CLOSE_ENOUGH: Final = 2

_PRE_WARM_UP_WORDS: Final = 256
_PRE_WARM_UP_TOKENS: Final = 8

_PLAIN: Final = re.findall(
    r"\w+",
    "the of and to in is that for it was on are as with at be this have from or one had by word but not what all were "
    "we when your can said there use an each which she do how their if will up other about out many then them these so "
    "some her would make like him into time has look two more go see way could people than first water been call who "
    "now find long down day did get come made may part",
)
_WORD_OF_BYTE: Final = tuple(_PLAIN[byte % len(_PLAIN)] for byte in range(256))


def pre_warm_up(count: int, text_tokens: int, max_tokens: int) -> tuple[Prompt, ...]:
    """`count` prompts, as many as run together later, so that the kernels of a full batch get warm too.

    They start with a word that no text of a workload starts with, so that nothing of them is reused. A word may be
    several tokens: an eighth of `text_tokens` fits wherever one of the workload's texts fits.
    """
    words = " ".join(["hello"] * max(1, min(_PRE_WARM_UP_WORDS, text_tokens // 8)))
    tokens = min(_PRE_WARM_UP_TOKENS, max_tokens)
    return tuple(Prompt(f"prewarm_{i}", f"Warm-up {i}: {words}", tokens) for i in range(count))


async def fitted_prose(
    opening: str, seed: int, tokens: int, count_tokens: CountTokens, make: Callable[[int, int], str] = prose
) -> str:
    """`opening` and then prose from `seed`, together `tokens` tokens or up to two fewer.

    make: of a seed and a number of words, the text; it may have more words.

    Cut between words, so the last few tokens may be missing. Counted in words where the server can't count tokens.
    """
    words = _Words(opening, seed, make)
    size = max(1, tokens - len(opening.split()))
    best = words.text(size)
    count = await count_tokens(best)
    if count is None:
        return best
    fits, too_long = 0, None  # the longest size known to fit, the shortest known not to
    for _ in range(_MAX_COUNTS):
        if count <= tokens:
            fits, best = size, words.text(size)
            if tokens - count <= _CLOSE_ENOUGH:
                break
        else:
            too_long = size
        guess = max(1, round(size * tokens / max(count, 1)))
        # The proportional guess may leave the bracket, or repeat an end of it: then halve.
        upper = too_long if too_long is not None else guess + 1 + size
        size = guess if fits < guess < upper else (fits + upper) // 2
        if size in (fits, too_long):
            break
        count = await count_tokens(words.text(size)) or 0
    return best if fits else words.text(1)


def plain_words(name: str, count: int) -> str:
    """So many words, the same for the same name: most tokenizers have one token for each of them.

    A word is a byte of a digest: an open loop makes them between two requests, and must not be late for the second.
    """
    return " ".join(map(_WORD_OF_BYTE.__getitem__, shake_128(name.encode()).digest(count)))


async def words_per_token(count_tokens: CountTokens) -> float:
    """How many plain words the server makes a token of; 1 where it can't count tokens."""
    tokens = await count_tokens(plain_words("sample", _SAMPLE_WORDS))
    return _SAMPLE_WORDS / tokens if tokens else 1.0


class _Words:
    """The first words of one prose text, with the white space between them; grows when more are asked for."""

    def __init__(self, opening: str, seed: int, make: Callable[[int, int], str]) -> None:
        self._opening = opening
        self._seed = seed
        self._make = make
        self._ends: list[int] = []
        self._prose = ""

    def text(self, words: int) -> str:
        if words > len(self._ends):
            # A prefix of the longer text need not equal the shorter text, so sizes are compared within one text only;
            # growing by half keeps that from happening more than once or twice.
            self._prose = self._make(self._seed, words + words // 2)
            self._ends = [match.end() for match in re.finditer(r"\S+", self._prose)]
        return self._opening + self._prose[: self._ends[min(words, len(self._ends)) - 1]]
