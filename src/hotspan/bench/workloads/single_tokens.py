"""Words of which a text has exactly as many tokens as words, whatever their order."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Self

from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.bench.tokenizer import ModelTokenizer

_WORD: Final = re.compile("[ \u0120\u2581]([a-z]+)")
"""A token that begins a word: after a space, GPT-2's byte-level spelling of it, or SentencePiece's."""

_BEFORE: Final = "x"
"""Any word, behind which another one is tried."""


@dataclass(frozen=True, slots=True)
class SingleTokens:
    """Such words, as LMCache's bench (0.5.6) draws them.

    is_led: a text of them begins with a space, as most tokenizers have the space in the token of the word behind it.
    """

    words: tuple[str, ...]
    is_led: bool

    @classmethod
    def draw(cls, tokenizer: "ModelTokenizer", count: int, seed: int) -> Self:
        """So many words, the same for the same tokenizer and seed.

        Raises: ConfigError if the tokenizer has too few, or if words together are other tokens than alone.
        """
        found = sorted({match[1] for token in tokenizer.vocabulary if (match := _WORD.fullmatch(token))})
        words, is_led = _single(tokenizer, found, " ", 0), True
        if len(words) < count:
            behind = _single(tokenizer, found, f"{_BEFORE} ", tokenizer.count(_BEFORE))
            if len(behind) > len(words):
                words, is_led = behind, False
        if len(words) < count:
            raise ConfigError(
                f"the tokenizer of --model-config has {len(words)} words of one token each, and the requests of "
                f"LMCache's bench need {count}: leave out --model-config for requests without a tokenizer"
            )
        drawn = cls(tuple(Random(seed).sample(words, count)), is_led)
        if (tokens := tokenizer.count(drawn.join(drawn.words))) != count:
            raise ConfigError(
                f"{count} words are {tokens} tokens for the tokenizer of --model-config, though each alone is one: "
                "leave out --model-config for requests without a tokenizer"
            )
        return drawn

    def join(self, words: Sequence[str]) -> str:
        """A text of these words."""
        text = " ".join(words)
        return f" {text}" if text and self.is_led else text

    def text(self, words: int, seed: int) -> str:
        """A text of so many words, the same for the same seed; a word may come again."""
        return self.join(Random(seed).choices(self.words, k=words))


def _single(tokenizer: "ModelTokenizer", words: Sequence[str], before: str, tokens: int) -> list[str]:
    """The words that are one token more behind a text of so many tokens."""
    counts = tokenizer.counts([before + word for word in words])
    return [word for word, count in zip(words, counts, strict=True) if count == tokens + 1]
