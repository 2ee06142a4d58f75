"""Tokenizers and a dataset that can be made again: what some streams (streams.py) need besides flags and a seed."""

import contextlib
import json
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from hotspan.bench.prose import prose

DATASET: Final = "questions.jsonl"
TOKENIZERS: Final = ("byte-level", "sentencepiece", "no-template")

_SYLLABLES: Final = tuple(map("".join, product("bcdfghjklmnpqrstvwxz", "aeiou")))
_UNREACHABLE: Final = ("bababa", "dedede")
"""In the vocabulary, without the merges that would make them: words that look like one token and are several."""

_TEMPLATE: Final = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|system|>\nAnswer.<|end|>\n{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@contextlib.contextmanager
def material() -> Iterator[None]:
    """A temporary working directory with a directory for each of TOKENIZERS, and DATASET."""
    with tempfile.TemporaryDirectory(prefix="hotspan-streams-") as directory, contextlib.chdir(directory):
        for name in TOKENIZERS:
            _write(Path(name), _sentencepiece() if name == "sentencepiece" else _byte_level(), name)
        Path(DATASET).write_text("".join(json.dumps(record) + "\n" for record in _records()))
        yield


def _write(directory: Path, tokenizer: Tokenizer, name: str) -> None:
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    if name != "no-template":
        settings["chat_template"] = _TEMPLATE
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def _byte_level() -> Tokenizer:
    """GPT-2's kind: the space belongs to the word behind it. Its file truncates, which requests must not."""
    tokenizer = Tokenizer(_model(sorted(pre_tokenizers.ByteLevel.alphabet()), "\u0120", [("\u010a", "\u010a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, max_length=64)


def _sentencepiece() -> Tokenizer:
    """Llama 2's kind: a text begins with a space of its own, so that another one in front of it is a token."""
    letters = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(_model(letters, "\u2581", [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]  # type: ignore[list-item]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _finished(tokenizer)


def _model(letters: list[str], space: str, more: list[tuple[str, str]], **settings: Any) -> models.BPE:
    """All words of one or two syllables are one token each behind a space, 10,100 of them."""
    merges = [(syllable[0], syllable[1]) for syllable in _SYLLABLES] + more
    merges += [(space, syllable) for syllable in _SYLLABLES]
    merges += [(space + one, two) for one, two in product(_SYLLABLES, _SYLLABLES)]
    tokens = [*letters, *(one + two for one, two in merges), *(space + word for word in _UNREACHABLE)]
    return models.BPE({token: number for number, token in enumerate(tokens)}, merges, **settings)


def _finished(tokenizer: Tokenizer, max_length: int | None = None) -> Tokenizer:
    tokenizer.add_special_tokens(["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", begin)])
    if max_length is not None:
        tokenizer.enable_truncation(max_length)
    return tokenizer


def _records() -> list[dict[str, Any]]:
    """Questions in the shapes of MuSiQue, HotpotQA, CacheBlend and RAGAS; some documents belong to several."""
    texts = [prose(number, 40 + 37 * number) for number in range(8)]
    supported = [{"idx": n, "title": f" Title {n} ", "paragraph_text": texts[n]} for n in (0, 1, 2, 3)]
    sentences = [[f"{part}." for part in text.split(".")] for text in texts]
    return [
        {"id": "2hop__1_2", "paragraphs": supported, "question": " Who keeps the mill? ", "answer": "The Old Miller"}
        | {"answer_aliases": ["miller"]},
        {"_id": "5a8b", "context": {"title": ["A", "B"], "sentences": sentences[3:5]}, "question": "Is it so?"}
        | {"answer": "yes"},
        {"context": [["C", sentences[5]], ["", sentences[6]]], "question": "Where?", "answer": "in {a} bridge"},
        {
            "ctxs": [{"title": "Title 2", "text": texts[2]}, {"text": texts[7]}],
            "question": "Why?",
            "answers": ["so it is"],
        },
        {"retrieved_contexts": [texts[0], "  ", texts[6]], "user_input": "How?", "reference": "slowly, by a road"},
        {"id": 7, "contexts": [texts[1]], "query": "When?", "answers": ["1984", "84"]},
    ]
