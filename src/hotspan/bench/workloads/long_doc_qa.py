"""Questions about long documents, asked again and again: what a cache of prefixes is for.

The request stream of `--ldqa-text filler` is that of `lmcache bench engine` (LMCache 0.5.6, Apache-2.0): documents,
questions and order (benchmarks/peers/streams.py compares them). `prose` has the same shape over text that tokenizes
like text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final, Literal

from hotspan.bench.manual import manual
from hotspan.bench.prose import prose
from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import option

QUESTIONS: Final = (
    "What is this document about?",
    "Summarize the key points.",
    "What is the main topic discussed?",
    "Provide a brief overview.",
)

# The filler leaves this many tokens of the requested length to the number and the question.
_RESERVED_TOKENS: Final = 10


@dataclass(frozen=True, slots=True)
class LongDocQaOptions(WorkloadOptions):
    """The flags `--ldqa-*`."""

    NAME: ClassVar[str] = "long-doc-qa"
    PREFIX: ClassVar[str] = "ldqa"
    COUNTS: ClassVar[str] = "num_documents"
    LENGTHS: ClassVar[tuple[str, ...]] = ("document_length", "max_output_length")

    document_length: int = option(10_000, "Tokens per document.", kind=COUNT)
    query_per_document: int = option(2, "Questions per document.", kind=COUNT)
    shuffle_policy: Literal["random", "tile"] = option(
        "random", "Order of requests: random, or tile (the first question of every document, then the second, ...)."
    )
    num_inflight_requests: int = option(3, "Maximum number of concurrent requests in the query round.", kind=COUNT)
    max_output_length: int = option(128, "Maximum number of tokens per answer.", kind=COUNT)
    text: Literal["filler", "prose", "manual"] = option(
        "filler",
        "Text of the documents: filler (one word repeated), prose (varied text), or manual (Python's language "
        "reference, which people wrote).",
    )
    num_documents: int = option(0, "Number of documents. Default: computed from --kv-cache-volume.", kind=NATURAL)

    @property
    def tokens_each(self) -> int:
        return self.document_length

    @property
    def tokens_answered(self) -> int:
        return self.max_output_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, each document alone, the questions in their order, and those alone."""
        documents = [await self._document(number, seed, count_tokens) for number in range(self.count(scale))]
        order = schedule(len(documents), self.query_per_document, self.shuffle_policy, seed)
        queries = tuple(query.prompt(documents[query.document], self.max_output_length) for query in order)
        warm_up = tuple(Prompt(f"warmup_doc{i}", text, 1) for i, text in enumerate(documents))
        first = pre_warm_up(self.num_inflight_requests, self.document_length, self.max_output_length)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, self.num_inflight_requests),
            ClosedLoop(RoundName.WARM_UP, warm_up),
            ClosedLoop(RoundName.QUERY, queries, self.num_inflight_requests),
            ClosedLoop(RoundName.CHECK, queries),
        )

    async def _document(self, number: int, seed: int, count_tokens: CountTokens) -> str:
        opening = f"Document {number}: "
        if self.text == "filler":
            return opening + " ".join(["hi"] * max(self.document_length - _RESERVED_TOKENS, 1))
        # Seeds of two runs with neighbouring --seed must not share documents.
        make = manual if self.text == "manual" else prose
        return await fitted_prose(opening, seed * 1_000_003 + number, self.document_length, count_tokens, make)


@dataclass(frozen=True, slots=True)
class Query:
    """One entry of the schedule: which question about which document."""

    document: int
    question: int

    def prompt(self, document: str, max_tokens: int) -> Prompt:
        """It, asked about the text of its document."""
        content = f"{document}\n\nQuestion {self.question}: {QUESTIONS[self.question % len(QUESTIONS)]}"
        return Prompt(f"doc{self.document}_q{self.question}", content, max_tokens)


def schedule(documents: int, questions: int, policy: str, seed: int) -> list[Query]:
    """Every question about every document, question by question; shuffled by the seed if the policy is random."""
    queries = [Query(document, question) for question in range(questions) for document in range(documents)]
    if policy == "random":
        Random(seed).shuffle(queries)
    return queries
