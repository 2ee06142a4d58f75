"""Questions with known answers over the same documents in changing order: whether reuse costs right answers.

    [document 3][separator][document 1] ... [separator][question]

Each question is asked twice: as it stands, from whatever cache holds its documents, and in a round of its own with a
`cache_salt` that nobody has used, so that the engine computes it all. Both rounds have their share of right answers,
the mean F1 of their answers, and their times. Flags and datasets are those of `lmcache bench engine`; prompts are our
own, as LMCache's need the model's tokenizer in the client.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial
from pathlib import Path
from random import Random
from typing import ClassVar, Final

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.long_doc_permutator import SEPARATOR, orders
from hotspan.bench.workloads.questions import Case, read_cases
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT, NATURAL
from hotspan.config.options import option

_WARM_UP_ORDERS: Final = 2
"""A text is kept for reuse when it is seen a second time."""

_INSTRUCTION: Final = "Answer with the name alone."
_FINAL_ANSWER: Final = "End with the answer alone, as short as possible, as <final_answer>answer</final_answer>."
_OUTPUT_LENGTH: Final = 24
_OUTPUT_LENGTH_OF_DATASETS: Final = 1024
_COLOURS: Final = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey")
_THINGS: Final = ("lighthouse", "bridge", "ferry", "mill", "harbour", "station", "museum", "library", "theatre")
_PEOPLE: Final = ("Anna", "Bert", "Clara", "Dirk", "Elsa", "Fred", "Greta", "Hans", "Ida", "Jonas", "Karla", "Ludwig")


@dataclass(frozen=True, slots=True)
class RagQaQualityOptions(WorkloadOptions):
    """The flags `--rag-*`."""

    NAME: ClassVar[str] = "rag-qa-quality"
    PREFIX: ClassVar[str] = "rag"
    COUNTS: ClassVar[str] = "num_cases"

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

    @property
    def tokens_each(self) -> int:
        return self.num_documents * self.document_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, two orders of each case, the questions, and these computed anew.

        Raises: ConfigError if the file can't be read, or holds no cases.
        """
        if self.dataset:
            cases = read_cases(Path(self.dataset).expanduser(), self.num_samples)
        else:
            cases = [await self._invented(seed * 1_000_003 + number, count_tokens) for number in range(self.num_cases)]
        instruction = self.instruction or (_FINAL_ANSWER if self.dataset else _INSTRUCTION)
        tokens = self.max_output_length or (_OUTPUT_LENGTH_OF_DATASETS if self.dataset else _OUTPUT_LENGTH)
        warm_up: list[Prompt] = []
        queries: list[Prompt] = []
        for number, case in enumerate(cases):
            for place, order in enumerate(_orders(len(case.documents), len(case.questions), seed + number)):
                at = place - _WARM_UP_ORDERS
                text, answers, kind = case.questions[max(0, at)]
                name = f"case{number}_{kind}{at}" if at >= 0 else f"case{number}_order{place}"
                content = SEPARATOR.join([*(case.documents[n] for n in order), f"{text} {instruction}"])
                prompt = Prompt(name, content, tokens, answers=answers if at >= 0 else ())
                (queries if at >= 0 else warm_up).append(prompt)
        first = pre_warm_up(self.num_inflight_requests, self.tokens_each, tokens)
        return (
            ClosedLoop(RoundName.PRE_WARM_UP, first, self.num_inflight_requests),
            ClosedLoop(RoundName.WARM_UP, tuple(warm_up)),
            ClosedLoop(RoundName.QUERY, tuple(queries), self.num_inflight_requests),
            ClosedLoop(RoundName.ANEW, tuple(queries), self.num_inflight_requests),
            ClosedLoop(RoundName.CHECK, tuple(queries)),
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
            questions.append((f"What is the keeper of {near} called?", (keeper,), "one"))
            questions.append((f"Where does the road from {far} end?", (other.removeprefix("the "),), "place"))
        draw.shuffle(questions)
        return Case(tuple(documents), tuple(questions[n % len(questions)] for n in range(self.num_questions)))


def _orders(documents: int, questions: int, seed: int) -> list[tuple[int, ...]]:
    """Orders for two warm-ups and each question; where there are too few, they repeat."""
    wanted = _WARM_UP_ORDERS + questions
    found = orders(documents, min(wanted, factorial(min(documents, 20))), seed)
    return [found[n % len(found)] for n in range(wanted)]
