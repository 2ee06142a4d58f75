"""The model's tokenizer in the client, which some requests of LMCache's bench are made with."""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hotspan.router.template import ChatTemplate
from hotspan.router.tokens import read_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE: Final = "tokenizer.json"

_PROBE: Final = "\ue000content\ue001"
"""Of private characters, which no template has or changes."""


class ModelTokenizer:
    """A model's tokenizer and its chat template. Counts are without the special tokens around a prompt."""

    def __init__(self, tokenizer: "Tokenizer", template: ChatTemplate | None = None) -> None:
        """Mutates: the tokenizer no longer truncates or pads."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, directory: Path) -> "ModelTokenizer | None":
        """The tokenizer in a model's directory; None if it has no tokenizer.json.

        Raises: ConfigError if the tokenizer or its template can't be read, ModuleNotFoundError without `tokenizers`.
        """
        if not (directory / TOKENIZER_FILE).is_file():
            return None
        return cls(read_tokenizer(directory), ChatTemplate.load(directory))

    @property
    def vocabulary(self) -> Iterable[str]:
        """The tokens as tokenizer.json spells them, in no order."""
        return self._tokenizer.get_vocab().keys()

    def count(self, text: str) -> int:
        return self.counts([text])[0]

    def counts(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text."""
        return [len(each.ids) for each in self._tokenizer.encode_batch(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens. Special tokens, and IDs that are no token's, have none."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    @cached_property
    def tokens_before_chat(self) -> int:
        """How many tokens the chat template puts before the first user's message; 0 without a template."""
        messages = [{"role": "user", "content": _PROBE}]
        text = self._template.render(messages, {}) if self._template is not None else None
        return self.count(text.split(_PROBE)[0]) if text else 0
