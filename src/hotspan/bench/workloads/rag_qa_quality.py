"""Questions with known answers over documents: whether reuse costs right answers.

Flags and datasets are those of `lmcache bench engine`. If the client has the model's tokenizer, so are the requests
about a dataset (LMCache 0.5.6, Apache-2.0; benchmarks/peers/streams.py compares them). Instructions and documents are
padded to whole chunks, and the warm-up sends each document alone:

    [instructions][document 1][document 2] ... [question]

Without a tokenizer the prompts are our own. The warm-up has the documents of a case in two orders, and each question
has another one:

    [document 3][separator][document 1] ... [separator][question]

Each question is asked twice: as it stands, from whatever cache holds its documents, and in a round of its own with a
`cache_salt` that nobody has used, so that the engine computes it all. Both rounds have their share of right answers,
the mean F1 of their answers, and their times.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import factorial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.alignment import Alignment
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.long_doc_permutator import SEPARATOR, orders
from hotspan.bench.workloads.questions import Case, Question, read_cases
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL, PAIRS
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

if TYPE_CHECKING:
    from hotspan.bench.tokenizer import ModelTokenizer

INSTRUCTIONS: Final = (
    "Answer the question using only the given passages. You may reason through the problem, but put only the concise "
    "final answer between <final_answer> and </final_answer>. Always emit both tags.\n\n"
    "The following are the given passages.\n"
)
QUESTION: Final = (
    "\n\nAnswer the question using only the passages above. End with exactly one concise answer in this form: "
    "<final_answer>answer</final_answer>.\n\nQuestion: {question}\nAnswer:"
)
"""These two are LMCache's, as its requests have them."""

_WARM_UP_ORDERS: Final = 2
"""A text is kept for reuse when it is seen a second time."""

_INSTRUCTION: Final = "Answer with the name alone."
_FINAL_ANSWER: Final = "End with the answer alone, as short as possible, as <final_answer>answer</final_answer>."
_OUTPUT_LENGTH: Final = 24
_OUTPUT_LENGTH_OF_DATASETS: Final = 1024
_ALIGN_TOKENS: Final = 256
_COLOURS: Final = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey")
_THINGS: Final = ("lighthouse", "bridge", "ferry", "mill", "harbour", "station", "museum", "library", "theatre")
_PEOPLE: Final = ("Anna", "Bert", "Clara", "Dirk", "Elsa", "Fred", "Greta", "Hans", "Ida", "Jonas", "Karla", "Ludwig")


@dataclass(frozen=True, slots=True)
class RagQaQualityOptions(WorkloadOptions):
    """The flags `--rag-*`."""

    NAME: ClassVar[str] = "rag-qa-quality"
    PREFIX: ClassVar[str] = "rag"
    COUNTS: ClassVar[str] = "num_cases"
    LENGTHS: ClassVar[tuple[str, ...]] = ("num_documents", "document_length", "max_output_length")

    dataset: str = option(
        "",
        "JSON or JSON Lines file of questions with their documents and answers: records of MuSiQue, HotpotQA or RAGAS, "
        'or {"documents": [TEXT, ...], "questions": [{"question": TEXT, "answers": [TEXT, ...]}, ...]}. '
        "Default: texts with invented facts.",
    )
    num_samples: int = option(50, "Maximum number of questions from --rag-dataset, in its order.", kind=COUNT)
    num_cases: int = option(4, "Number of cases, each with documents of its own, without --rag-dataset.", kind=COUNT)
    num_documents: int = option(5, "Documents in each case, without --rag-dataset.", kind=COUNT)
    document_length: int = option(1000, "Tokens per document, without --rag-dataset.", kind=COUNT)
    num_questions: int = option(
        10, "Questions per case, without --rag-dataset; each with an order of its own.", kind=COUNT
    )
    instruction: str = option(
        "", f"Text behind each question. Default: {_INSTRUCTION!r}; with --rag-dataset, {_FINAL_ANSWER!r}."
    )
    num_inflight_requests: int = option(1, "Maximum number of concurrent requests.", kind=COUNT)
    max_output_length: int = option(
        0,
        f"Maximum number of tokens per answer. Default: {_OUTPUT_LENGTH}; with --rag-dataset, "
        f"{_OUTPUT_LENGTH_OF_DATASETS}.",
        kind=NATURAL,
    )
    doc_align_tokens: int = option(
        _ALIGN_TOKENS,
        "Pad documents to a multiple of this many tokens: the server's chunk size. For requests with a tokenizer "
        "(--model-config).",
        kind=COUNT,
    )
    template_kwargs: Mapping[str, str] = option(
        {},
        "Variable for the model's chat template, such as enable_thinking=false. May be repeated.",
        kind=PAIRS,
    )
    output: str = option(
        "",
        "JSON file for the result of each question, of requests with a tokenizer (--model-config). "
        "Default: rag_qa_quality.json in the directory of --output.",
    )

    @property
    def tokens_each(self) -> int:
        return self.num_documents * self.document_length

    @property
    def sized_by(self) -> tuple[str, ...]:
        return () if self.dataset else self.LENGTHS

    @property
    def tokens_answered(self) -> int:
        return self.output_length

    @property
    def takes_tokenizer(self) -> bool:
        return bool(self.dataset) and not self.instruction

    @property
    def output_length(self) -> int:
        """Maximum number of tokens per answer."""
        return self.max_output_length or (_OUTPUT_LENGTH_OF_DATASETS if self.dataset else _OUTPUT_LENGTH)

    @property
    def template_variables(self) -> dict[str, bool | int | str]:
        """--rag-template-kwargs, of which true, false and whole numbers are no text."""
        return {name: _typed(value) for name, value in self.template_kwargs.items()}

    @property
    def body(self) -> Mapping[str, Any]:
        return {"chat_template_kwargs": self.template_variables} if self.template_kwargs else {}

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, two orders of each case, the questions, and these computed anew.

        Raises: ConfigError if the file can't be read, or holds no cases, or for flags of requests with a tokenizer.
        """
        if self.output or self.doc_align_tokens != _ALIGN_TOKENS:
            raise ConfigError(
                "--rag-output and --rag-doc-align-tokens are for requests with the model's tokenizer: pass "
                "--rag-dataset, --model-config DIR with a tokenizer.json, and no --rag-instruction"
            )
        if self.dataset:
            cases = self._read()
        else:
            cases = [await self._invented(seed * 1_000_003 + number, count_tokens) for number in range(self.num_cases)]
        instruction = self.instruction or (_FINAL_ANSWER if self.dataset else _INSTRUCTION)
        warm_up: list[Prompt] = []
        queries: list[Prompt] = []
        for number, case in enumerate(cases):
            for place, order in enumerate(_orders(len(case.documents), len(case.questions), seed + number)):
                at = place - _WARM_UP_ORDERS
                asked = case.questions[max(0, at)]
                name = f"case{number}_{asked.kind}{at}" if at >= 0 else f"case{number}_order{place}"
                content = SEPARATOR.join([*(case.documents[n] for n in order), f"{asked.text} {instruction}"])
                prompt = Prompt(name, content, self.output_length, answers=asked.answers if at >= 0 else ())
                (queries if at >= 0 else warm_up).append(prompt)
        return self._rounds(tuple(warm_up), tuple(queries))

    def token_rounds(self, scale: Scale, seed: int, tokenizer: "ModelTokenizer") -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, each document alone, the questions, and these computed anew.

        Raises: ConfigError as `rounds` does, or if the tokenizer has too few words.
        """
        alignment = Alignment(tokenizer, self.doc_align_tokens, seed)
        opening = alignment.opening(INSTRUCTIONS)
        cases = self._read()
        documents = {text: alignment.document(text) for case in cases for text in case.documents}
        learnt = dict.fromkeys(documents.values())
        warm_up = (Prompt(f"prefill_doc{number}", opening + text, 1) for number, text in enumerate(learnt))
        queries: list[Prompt] = []
        for case in cases:
            texts = opening + "".join(documents[text] for text in case.documents)
            for asked in case.questions:
                content = texts + QUESTION.format(question=asked.text)
                name = f"sample{len(queries)}"
                queries.append(
                    Prompt(name, content, self.output_length, answers=asked.answers, sample_id=asked.sample_id)
                )
        return self._rounds(tuple(warm_up), tuple(queries))

    def _read(self) -> list[Case]:
        return read_cases(Path(self.dataset).expanduser(), self.num_samples)

    def _rounds(self, warm_up: tuple[Prompt, ...], queries: tuple[Prompt, ...]) -> Sequence[ClosedLoop]:
        first = pre_warm_up(self.num_inflight_requests, self.tokens_each, self.output_length)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, self.num_inflight_requests),
            ClosedLoop(RoundName.WARM_UP, warm_up),
            ClosedLoop(RoundName.QUERY, queries, self.num_inflight_requests),
            ClosedLoop(RoundName.ANEW, queries, self.num_inflight_requests),
            ClosedLoop(RoundName.CHECK, queries),
        )

    async def _invented(self, seed: int, count_tokens: CountTokens) -> Case:
        """Documents of prose, each with two facts that no other has; questions for one fact, and for two."""
        draw = Random(seed)
        places = [f"the {colour} {thing}" for colour in _COLOURS for thing in _THINGS]
        chosen = draw.sample(places, 2 * self.num_documents)
        documents, questions = [], []
        for number in range(self.num_documents):
            near, far = chosen[2 * number : 2 * number + 2]
            keeper = draw.choice(_PEOPLE)
            other = chosen[(2 * number + 3) % len(chosen)]
            facts = f"The keeper of {near} is called {keeper}. The road from {far} ends at {other}. "
            documents.append(await fitted_prose(facts, seed + 31 * number + 1, self.document_length, count_tokens))
            questions.append(Question(f"What is the keeper of {near} called?", (keeper,), "one"))
            questions.append(Question(f"Where does the road from {far} end?", (other.removeprefix("the "),), "place"))
        draw.shuffle(questions)
        return Case(tuple(documents), tuple(questions[n % len(questions)] for n in range(self.num_questions)))


def _orders(documents: int, questions: int, seed: int) -> list[tuple[int, ...]]:
    """Orders for two warm-ups and each question; where there are too few, they repeat."""
    wanted = _WARM_UP_ORDERS + questions
    found = orders(documents, min(wanted, factorial(min(documents, 20))), seed)
    return [found[n % len(found)] for n in range(wanted)]


def _typed(value: str) -> bool | int | str:
    if value.lower() in ("true", "false"):
        return value.lower() == "true"
    return int(value) if re.fullmatch("-?[0-9]+", value) else value
