"""Questions about long documents, asked again and again: what a cache of prefixes is for.

The request stream of `--ldqa-text filler` is the one that users of `lmcache bench engine` know (documents, numbering,
order); the wording of the questions is our own. `prose` has the same shape over text that tokenizes like text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import ClassVar, Final, Literal

from hotspan.bench.records import RoundName
from hotspan.bench.texts import fitted_prose, pre_warm_up
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, Workload
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import check, option
from hotspan.core.errors import ConfigError

QUESTIONS: Final = (
    "What does the text above deal with?",
    "Which points in it matter most?",
    "What is its main subject, in one sentence?",
    "How would you sum it up for a colleague?",
)

# The filler leaves this many tokens of the requested length to the number and the question.
_RESERVED_TOKENS: Final = 10


@dataclass(frozen=True, slots=True)
class LongDocQaOptions:
    """The flags `--ldqa-*`."""

    NAME: ClassVar[str] = "long-doc-qa"
    PREFIX: ClassVar[str] = "ldqa"
    COUNT_FLAG: ClassVar[str] = "--ldqa-num-documents"

    document_length: int = option(10_000, "Tokens per document.", kind=COUNT)
    query_per_document: int = option(2, "Questions per document.", kind=COUNT)
    shuffle_policy: Literal["random", "tile"] = option(
        "random", "Order of requests: random, or tile (the first question of every document, then the second, ...)."
    )
    num_inflight_requests: int = option(3, "Maximum number of concurrent requests in the query round.", kind=COUNT)
    max_output_length: int = option(128, "Maximum number of tokens per answer.", kind=COUNT)
    text: Literal["filler", "prose"] = option(
        "filler", "Text of the documents: filler (one word repeated) or prose (varied text)."
    )
    num_documents: int = option(0, "Number of documents. Default: computed from --kv-cache-volume.", kind=NATURAL)

    def __post_init__(self) -> None:
        check(self, f"{self.PREFIX}_")

    @property
    def needs_scale(self) -> bool:
        return self.num_documents == 0

    def documents(self, scale: Scale) -> int:
        """How many documents: as asked, or as many as fill the volume, at least one."""
        if self.num_documents:
            return self.num_documents
        if scale.tokens_per_gb is None:
            raise ConfigError(
                "the number of documents is unknown: pass --ldqa-num-documents or --tokens-per-gb-kvcache"
            )
        return max(1, int(scale.kv_cache_volume * scale.tokens_per_gb / self.document_length))

    def build(self, scale: Scale, seed: int) -> Workload:
        return LongDocQa(self, self.documents(scale), seed)


@dataclass(frozen=True, slots=True)
class Query:
    """One entry of the schedule: which question about which document."""

    document: int
    question: int

    @property
    def request_id(self) -> str:
        return f"doc{self.document}_q{self.question}"


def schedule(documents: int, questions: int, policy: str, seed: int) -> list[Query]:
    """Every question about every document, question by question; shuffled by the seed if the policy is random."""
    queries = [Query(document, question) for question in range(questions) for document in range(documents)]
    if policy == "random":
        Random(seed).shuffle(queries)
    return queries


class LongDocQa:
    """Pre-warm-up on texts of their own, each document once alone, the questions in their order, and those alone."""

    def __init__(self, options: LongDocQaOptions, num_documents: int, seed: int) -> None:
        self.options = options
        self.seed = seed
        self.num_documents = num_documents
        self.documents: tuple[str, ...] = ()

    async def prepare(self, count_tokens: CountTokens) -> None:
        self.documents = tuple([await self._document(i, count_tokens) for i in range(self.num_documents)])

    async def _document(self, number: int, count_tokens: CountTokens) -> str:
        length = self.options.document_length
        opening = f"Document {number}: "
        if self.options.text == "filler":
            return opening + " ".join(["hi"] * max(length - _RESERVED_TOKENS, 1))
        # Seeds of two runs with neighbouring --seed must not share documents.
        return await fitted_prose(opening, self.seed * 1_000_003 + number, length, count_tokens)

    def rounds(self) -> Sequence[ClosedLoop]:
        options = self.options
        warm_up = tuple(Prompt(f"warmup_doc{i}", text, 1) for i, text in enumerate(self.documents))
        order = schedule(self.num_documents, options.query_per_document, options.shuffle_policy, self.seed)
        queries = tuple(map(self._ask, order))
        first = pre_warm_up(options.num_inflight_requests, options.document_length, options.max_output_length)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, options.num_inflight_requests),
            ClosedLoop(RoundName.WARM_UP, warm_up, 1),
            ClosedLoop(RoundName.QUERY, queries, options.num_inflight_requests),
            ClosedLoop(RoundName.CHECK, queries, 1),
        )

    def _ask(self, query: Query) -> Prompt:
        question = QUESTIONS[query.question % len(QUESTIONS)]
        content = f"{self.documents[query.document]}\n\nQuestion {query.question}: {question}"
        return Prompt(query.request_id, content, self.options.max_output_length)
