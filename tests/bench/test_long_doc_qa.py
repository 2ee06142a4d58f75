import asyncio
from hashlib import sha256
from random import Random
from typing import Literal

import pytest

from hotspan.bench.config import BenchConfig
from hotspan.bench.manual import manual
from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import Prompt, Scale
from hotspan.bench.workloads.long_doc_qa import QUESTIONS, LongDocQaOptions, schedule
from hotspan.bench.workloads.texts import fitted_prose
from hotspan.core.errors import ConfigError


async def no_tokenizer(text: str) -> int | None:
    return None


def prompts(options: LongDocQaOptions, scale: Scale, seed: int = 42) -> dict[RoundName, tuple[Prompt, ...]]:
    return {round.name: round.prompts for round in asyncio.run(options.rounds(scale, seed, no_tokenizer))}


def test_documents_are_the_filler_that_users_know() -> None:
    """Document i is its number and "hi" length-10 times; as many as fill the volume."""
    found = prompts(LongDocQaOptions(document_length=50), Scale(2.0, 85))
    texts = [prompt.content for prompt in found[RoundName.WARM_UP]]
    assert texts == [f"Document {i}: " + " ".join(["hi"] * 40) for i in range(3)]
    assert {prompt.max_tokens for prompt in found[RoundName.WARM_UP]} == {1}


def test_a_document_is_never_empty() -> None:
    """The filler has at least one word and the volume at least one document, however small both are."""
    found = prompts(LongDocQaOptions(document_length=3), Scale(0.001, 1))
    assert [prompt.content for prompt in found[RoundName.WARM_UP]] == ["Document 0: hi"]


def test_random_order_is_the_seeded_shuffle() -> None:
    """Policy random with seed 42 is `random.Random(42)`'s shuffle of the question-major pairs."""
    expected = [(document, question) for question in range(2) for document in range(4)]
    Random(42).shuffle(expected)
    assert [(q.document, q.question) for q in schedule(4, 2, "random", 42)] == expected
    literal = [(3, 0), (0, 1), (2, 1), (3, 1), (2, 0), (1, 1), (0, 0), (1, 0)]
    assert expected == literal, "the standard library's shuffle has changed: figures of old runs don't compare"


def test_tile_order_is_question_by_question() -> None:
    """Policy tile asks question 0 about every document, then question 1."""
    order = [(q.document, q.question) for q in schedule(2, 2, "tile", 42)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_questions_repeat_after_the_fourth() -> None:
    """A query is the document, a blank line, its question's number and one of four questions in turn."""
    options = LongDocQaOptions(
        document_length=20, query_per_document=6, shuffle_policy="tile", num_documents=1, max_output_length=9
    )
    found = prompts(options, Scale(1, None))[RoundName.QUERY]
    document = "Document 0: " + " ".join(["hi"] * 10)
    assert [p.content for p in found] == [f"{document}\n\nQuestion {q}: {QUESTIONS[q % 4]}" for q in range(6)]
    assert [p.request_id for p in found] == [f"doc0_q{q}" for q in range(6)]
    assert {p.max_tokens for p in found} == {9}
    assert len(set(QUESTIONS)) == 4


def test_pre_warm_up_shares_no_prefix_with_a_document() -> None:
    """The pre-warm-up texts differ from the documents and from each other from their start."""
    found = prompts(LongDocQaOptions(document_length=4000, num_documents=2), Scale(1, None))
    openings = [prompt.content[:11] for prompt in found[RoundName.PRE_WARM_UP]]
    assert len(set(openings)) == 3
    assert not any(opening.startswith("Document") for opening in openings)


@pytest.mark.parametrize(("text", "digest"), [("filler", "51c1a243998b54b4"), ("prose", "fd704e03cb9fb21d")])
def test_the_stream_is_the_one_of_earlier_versions(text: Literal["filler", "prose"], digest: str) -> None:
    """Every round sends the same messages under the same ids in the same order as ever: figures keep comparing."""
    found = prompts(LongDocQaOptions(document_length=300, num_documents=4, text=text), Scale(1, None))
    stream = [(name.value, p.request_id, p.messages, p.max_tokens) for name, asked in found.items() for p in asked]
    assert all(message.role == "user" for _, _, (message,), _ in stream)
    lines = [f"{name} {request_id} {tokens} {message.content}" for name, request_id, (message,), tokens in stream]
    assert sha256("\n".join(lines).encode()).hexdigest()[:16] == digest


def test_prose_is_the_same_for_a_seed_and_different_for_another() -> None:
    """Two runs with one seed send the same prose; another seed, or another document, gives other prose."""
    options = LongDocQaOptions(document_length=80, num_documents=2, text="prose")
    first, again, other = (prompts(options, Scale(1, None), seed)[RoundName.WARM_UP] for seed in (1, 1, 2))
    assert first == again
    bodies = [p.content.split(": ", 1)[1] for p in (*first, *other)]
    assert len(set(bodies)) == 4


def test_the_manual_is_real_text_of_any_length() -> None:
    """Whole topics, other ones for another seed; all of it where more words are asked for than there are."""
    assert manual(1, 500) == manual(1, 500) != manual(2, 500)
    assert 500 <= len(manual(1, 500).split()) < 20_000 < len(manual(1, 10**9).split())
    options = LongDocQaOptions(document_length=80, num_documents=3, text="manual")
    bodies = {p.content.split(": ", 1)[1] for p in prompts(options, Scale(1, None))[RoundName.WARM_UP]}
    assert len(bodies) == 3 and all(60 < len(body.split()) <= 80 for body in bodies)


@pytest.mark.parametrize("tokens", [40, 333, 2048])
def test_prose_has_the_length_in_the_servers_tokens(tokens: int) -> None:
    """Prose is cut to the requested tokens as the server counts them, never over and at most two under."""

    async def count(text: str) -> int:
        return sum(1 + len(word) // 4 for word in text.split())

    text = asyncio.run(fitted_prose("Document 0: ", 7, tokens, count))
    longest_word = max(1 + len(word) // 4 for word in text.split())
    assert tokens - max(2, longest_word) <= asyncio.run(count(text)) <= tokens


@pytest.mark.parametrize(
    "wrong", [{"document_length": 0}, {"shuffle_policy": "sorted"}, {"text": "poem"}, {"num_documents": -1}]
)
def test_impossible_options_are_refused(wrong: dict[str, object]) -> None:
    """An option that can't work is a ConfigError that names the flag."""
    with pytest.raises(ConfigError, match=f"--ldqa-{next(iter(wrong)).replace('_', '-')}"):
        LongDocQaOptions(**wrong)  # type: ignore[arg-type]


def test_volume_needs_tokens_per_gib() -> None:
    """Without a number of documents and without tokens per GiB, building says which flags are missing."""
    with pytest.raises(ConfigError, match="--ldqa-num-documents or --tokens-per-gb-kvcache"):
        LongDocQaOptions().count(BenchConfig(options=LongDocQaOptions()).scale)
