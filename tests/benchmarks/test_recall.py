"""The recall model's questions have one right answer each, in whatever order the documents are; the model knows it."""

from random import Random

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from benchmarks.blend_quality import reordered
from benchmarks.recall import ASSETS, DOC, KIND, KINDS, ORDINAL, QUESTIONS, STOP, Texts, make_texts, right, shares


def solved(text: Texts, question: np.ndarray) -> int:
    """The answer, found by reading the documents of the first text."""
    kind, ordinal, key, _ = question.tolist()
    documents = [document.tolist() for document in text.documents[0]]
    values = {place: words[words.index(key) + 1] for place, words in enumerate(documents) if _has(words, key)}
    if KINDS[kind - KIND] == "one":
        return next(iter(values.values()))
    if KINDS[kind - KIND] == "two":
        meant = next(iter(values.values()))
        return next(words[words.index(meant) + 1] for words in documents if _has(words, meant))
    return values[ordinal - ORDINAL] if KINDS[kind - KIND] == "nth" else values[max(values)]


def _has(words: list[int], key: int) -> bool:
    """Whether a document has a fact about a key; the value of another may be that key."""
    return key in words and words[words.index(key) + 1] != STOP


@pytest.mark.parametrize("seed", range(20))
def test_answers_are_in_the_documents(seed: int) -> None:
    """Also once the documents have changed places: what depends on the order changes with it."""
    rng, random = np.random.default_rng(seed), Random(seed)
    text = make_texts(rng, 1, 2 + seed % 4, 20 + 10 * (seed % 5), QUESTIONS)
    order = tuple(random.sample(range(text.documents.shape[1]), text.documents.shape[1]))
    for each in (text, reordered(text, order)):
        prompt = each.prompt(0, 0)
        assert prompt.count(DOC) == each.documents.shape[1] + 1 and prompt[-3:] == each.questions[0, 0, :3].tolist()
        for question in each.questions[0]:
            assert solved(each, question) == question[3]


def test_the_model_answers_them() -> None:
    """The saved weights, on texts of their own, of a length that they were trained on and of a longer one."""
    model = Qwen2ForCausalLM.from_pretrained(ASSETS, dtype=torch.float32)
    rng = np.random.default_rng(1)
    for count, tokens in ((24, 60), (4, 500)):
        texts = make_texts(rng, count, 5, tokens, QUESTIONS)
        with torch.no_grad():
            _, found = right(model, texts)
        assert min(shares(found, texts).values()) > 0.9
