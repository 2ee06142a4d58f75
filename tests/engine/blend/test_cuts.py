"""Cuts: separators, and the markers of chat turns by a real tokenizer's template."""

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hotspan.engine.blend.cuts import cuts
from hotspan.engine.blend.runs import Run
from hotspan.engine.blend.windows import as_tokens, sections

WORDS = {word: number for number, word in enumerate(["?", "user", "assistant", "a", "b", "c", "doc", "#"])}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
REFUSING = "{{ raise_exception('no') }}"


def tokenizer(template: str | None) -> Any:
    words = Tokenizer(models.WordLevel(WORDS, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>", "<|unused|>")])
    made = PreTrainedTokenizerFast(tokenizer_object=words)
    made.chat_template = template
    return made


def test_a_document_at_a_turns_begin_is_a_section_of_its_own() -> None:
    """Turns and separators cut; a marker that the template does not use does not."""
    reader = tokenizer(CHATML)
    found = cuts(reader, ["# #", ""])
    assert found == [[7, 7], [8], [9]]
    ids = reader.encode("<|im_start|>user doc doc # # doc<|im_end|><|im_start|>assistant", add_special_tokens=False)
    assert sections(as_tokens(ids), found) == [Run(1, 4), Run(6, 7), Run(9, 10)]


@pytest.mark.parametrize("template", [None, PLAIN, REFUSING])
def test_without_markers_there_are_only_the_separators(template: str | None) -> None:
    """A template without special tokens, one that refuses the conversation, and none."""
    assert cuts(tokenizer(template), ["# #"]) == [[7, 7]]


def test_a_space_at_the_end_may_belong_to_the_next_word() -> None:
    """As in LMCache's " # # ": a byte-level tokenizer has it in the token of the word that follows."""
    words = Tokenizer(models.BPE({"Ġ": 0, "#": 1, "Ġ#": 2, "d": 3, "Ġd": 4}, [("Ġ", "#"), ("Ġ", "d")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reader = PreTrainedTokenizerFast(tokenizer_object=words)
    ids = reader.encode("d # # d", add_special_tokens=False)
    assert ids == [3, 2, 2, 4]
    assert sections(as_tokens(ids), cuts(reader, [" # # "])) == [Run(0, 1), Run(3, 4)]
