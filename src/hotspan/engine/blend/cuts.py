"""Where a text is cut: at the configured separators, and where a chat's turns begin and end."""

import logging
from collections.abc import Iterable
from typing import Any

logger = logging.getLogger(__name__)

_CONVERSATION = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
]


def cuts(tokenizer: Any, texts: Iterable[str]) -> list[list[int]]:
    """Separators as token ids: those of the configured texts, and the markers of the tokenizer's chat template.

    Texts count without spaces at their end, too: many tokenizers join these with the word that follows.
    """
    forms = [form for text in texts for form in dict.fromkeys((text, text.rstrip(" ")))]
    separators = [tokenizer.encode(form, add_special_tokens=False) for form in forms]
    return [separator for separator in separators if separator] + [[marker] for marker in turn_markers(tokenizer)]


def turn_markers(tokenizer: Any) -> list[int]:
    """The tokens with a meaning of their own that the chat template puts around messages; none if it has no such."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    try:
        rendered = tokenizer.apply_chat_template(_CONVERSATION, tokenize=False, add_generation_prompt=True)
        return sorted(set(tokenizer.encode(rendered, add_special_tokens=False)) & set(tokenizer.added_tokens_decoder))
    except Exception as error:  # a template may refuse any conversation; windows are found without cuts, too
        logger.warning("blend_without_turns: the chat template can't be rendered (%s)", error)
        return []
