"""Questions with known answers over the same documents in changing order: whether reuse costs right answers.

    [document 3][separator][document 1] ... [separator][question]

Each question is asked twice: as it stands, from whatever cache holds its documents, and in a round of its own with a
`cache_salt` that nobody has used, so that the engine computes it all. Both rounds have their share of right answers
and their times.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import factorial
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

from hotspan.bench.records import RoundName
from hotspan.bench.workloads.base import ClosedLoop, CountTokens, Prompt, Scale, WorkloadOptions
from hotspan.bench.workloads.long_doc_permutator import SEPARATOR, orders
from hotspan.bench.workloads.texts import fitted_prose, pre_warm_up
from hotspan.config.kinds import COUNT
from hotspan.config.options import option
from hotspan.core.errors import ConfigError

_WARM_UP_ORDERS: Final = 2
"""A text is kept for reuse when it is seen a second time."""

_INSTRUCTION: Final = "Answer with the name alone."
_COLOURS: Final = ("red", "green", "blue", "white", "black", "yellow", "brown", "grey")
_THINGS: Final = ("lighthouse", "bridge", "ferry", "mill", "harbour", "station", "museum", "library", "theatre")
_PEOPLE: Final = ("Anna", "Bert", "Clara", "Dirk", "Elsa", "Fred", "Greta", "Hans", "Ida", "Jonas", "Karla", "Ludwig")


@dataclass(frozen=True, slots=True)
class Case:
    """Documents, and questions about them.

    questions: the question, the answers of which any is right, and its kind.
    """

    documents: tuple[str, ...]
    questions: tuple[tuple[str, tuple[str, ...], str], ...]


@dataclass(frozen=True, slots=True)
class RagQaQualityOptions(WorkloadOptions):
    """The flags `--rqq-*`."""

    NAME: ClassVar[str] = "rag-qa-quality"
    PREFIX: ClassVar[str] = "rqq"
    COUNTS: ClassVar[str] = "num_cases"

    file: str = option(
        "",
        "JSON Lines file with your own cases, one per line: "
        '{"documents": [TEXT, ...], "questions": [{"question": TEXT, "answers": [TEXT, ...]}, ...]}. '
        "Default: texts with invented facts.",
    )
    num_cases: int = option(4, "Number of cases. Each has documents of its own.", kind=COUNT)
    num_documents: int = option(5, "Documents in each case, without --rqq-file.", kind=COUNT)
    document_length: int = option(1000, "Tokens per document, without --rqq-file.", kind=COUNT)
    num_questions: int = option(
        10, "Questions per case, without --rqq-file; each with an order of its own.", kind=COUNT
    )
    instruction: str = option("", f"Text behind each question. Default: {_INSTRUCTION!r}; with --rqq-file, none.")
    num_inflight_requests: int = option(1, "Maximum number of concurrent requests.", kind=COUNT)
    max_output_length: int = option(24, "Maximum number of tokens per answer.", kind=COUNT)

    @property
    def tokens_each(self) -> int:
        return self.num_documents * self.document_length

    async def rounds(self, scale: Scale, seed: int, count_tokens: CountTokens) -> Sequence[ClosedLoop]:
        """Pre-warm-up on texts of their own, two orders of each case, the questions, and these computed anew.

        Raises: ConfigError if the file can't be read, or holds no cases.
        """
        if self.file:
            cases = list(islice(read_cases(Path(self.file)), self.count(scale)))
        else:
            cases = [await self._invented(seed * 1_000_003 + number, count_tokens) for number in range(self.num_cases)]
        instruction = self.instruction or ("" if self.file else _INSTRUCTION)
        warm_up: list[Prompt] = []
        queries: list[Prompt] = []
        for number, case in enumerate(cases):
            for place, order in enumerate(_orders(len(case.documents), len(case.questions), seed + number)):
                at = place - _WARM_UP_ORDERS
                text, answers, kind = case.questions[max(0, at)]
                name = f"case{number}_{kind}{at}" if at >= 0 else f"case{number}_order{place}"
                content = SEPARATOR.join([*(case.documents[n] for n in order), f"{text} {instruction}".rstrip()])
                prompt = Prompt(name, content, self.max_output_length, answers=answers if at >= 0 else ())
                (queries if at >= 0 else warm_up).append(prompt)
        first = pre_warm_up(self.num_inflight_requests, self.tokens_each, self.max_output_length)
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


def read_cases(path: Path) -> Iterator[Case]:
    """The cases in a file of JSON Lines.

    Raises: ConfigError that names the line, if it can't be read or is no case.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rqq-file {path} can't be read: {error}") from error
    if not any(line.strip() for line in lines):
        raise ConfigError(f"--rqq-file {path} is empty: give one case per line")
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield _case(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f'--rqq-file {path}, line {number} is no case ({error}): give {{"documents": [TEXT, ...], '
                    '"questions": [{"question": TEXT, "answers": [TEXT, ...]}, ...]}'
                ) from error


def _case(value: Any) -> Case:
    documents = value["documents"]
    questions = [(each["question"], each["answers"], each.get("kind", "question")) for each in value["questions"]]
    texts = [*documents, *(text for question, answers, kind in questions for text in (question, *answers, kind))]
    if not documents or not questions or not all(text and isinstance(text, str) for text in texts):
        raise ValueError("there must be documents and questions, all texts")
    if not all(isinstance(answers, list) and answers for _, answers, _ in questions):
        raise ValueError("each question needs a list of answers")
    return Case(tuple(documents), tuple((question, tuple(answers), kind) for question, answers, kind in questions))


def _orders(documents: int, questions: int, seed: int) -> list[tuple[int, ...]]:
    """Orders for two warm-ups and each question; where there are too few, they repeat."""
    wanted = _WARM_UP_ORDERS + questions
    found = orders(documents, min(wanted, factorial(min(documents, 20))), seed)
    return [found[n % len(found)] for n in range(wanted)]
