"""Texts padded to whole chunks, so that a document has the same chunks wherever it stands in a prompt."""

from random import Random
from typing import TYPE_CHECKING, Final

from hotspan.bench.workloads.single_tokens import SingleTokens
from hotspan.core.types import round_up

if TYPE_CHECKING:
    from hotspan.bench.tokenizer import ModelTokenizer

_WORDS: Final = 4096
_ATTEMPTS: Final = 8
"""A token may span the end of a text and its padding, so that the first length is not always the right one."""


class Alignment:
    """Pads texts with words to a multiple of so many tokens, as LMCache's bench (0.5.6) does.

    The same tokenizer, length and seed pad a text the same. Where no attempt fits, the length of a text is off by a few
    tokens.
    """

    def __init__(self, tokenizer: "ModelTokenizer", tokens: int, seed: int) -> None:
        """Raises: ConfigError if the tokenizer has too few words of one token."""
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._seed = seed
        self._pool = SingleTokens.draw(tokenizer, _WORDS, seed)

    def opening(self, text: str) -> str:
        """A text that begins the first message: what the chat template has before it counts, too."""
        return self._padded(text, self._tokenizer.tokens_before_chat, Random(self._seed))

    def document(self, text: str) -> str:
        """A text behind others that are aligned. Its padding depends on it, so that no two texts have the same."""
        return self._padded(text, 0, Random(f"{self._seed}:{text}"))

    def _padded(self, text: str, before: int, draw: Random) -> str:
        tokens = before + self._tokenizer.count(text)
        wanted = round_up(tokens, self._tokens)
        words, padded = wanted - tokens, text
        for _ in range(_ATTEMPTS if words else 0):
            padded = f"{text}\n{self._pool.join([draw.choice(self._pool.words) for _ in range(words)])}"
            off = wanted - before - self._tokenizer.count(padded)
            if not off:
                break
            words += off
        return padded
