"""Questions about documents, with their answers, out of the files in which datasets come."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from hotspan.core.errors import ConfigError

_DOCUMENTS: Final = ("documents", "paragraphs", "ctxs", "contexts", "retrieved_contexts", "context")
_QUESTION: Final = ("question", "query", "user_input")
_ANSWERS: Final = ("answers", "answer", "reference")
_SHAPE: Final = (
    'give {"documents": [TEXT, ...], "questions": [{"question": TEXT, "answers": [TEXT, ...]}, ...]}, or a record of '
    "MuSiQue, HotpotQA or RAGAS"
)


class Question(NamedTuple):
    """A question. answers: of which any is right. sample_id: in its dataset, its place there if it has no other."""

    text: str
    answers: tuple[str, ...]
    kind: str
    sample_id: str = ""


@dataclass(frozen=True, slots=True)
class Case:
    """Documents, and questions about them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


def read_cases(path: Path, questions: int) -> list[Case]:
    """The cases of a file, as many as have that many questions.

    Raises: ConfigError that names the record which is none, or if the file can't be read or has none.
    """
    found: list[Case] = []
    left = questions
    for place, (where, record) in enumerate(_records(path)):
        try:
            case = _case(record, place)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"--rag-dataset {path}, {where} is no case ({error}): {_SHAPE}") from error
        found.append(replace(case, questions=case.questions[:left]))
        left -= len(found[-1].questions)
        if not left:
            break
    if not found:
        raise ConfigError(f"--rag-dataset {path} has no records: {_SHAPE}")
    return found


def _records(path: Path) -> Iterator[tuple[str, Any]]:
    """Each record, and where it is."""
    if path.suffix in (".parquet", ".pq"):
        raise ConfigError(f"--rag-dataset {path}: Parquet is not read: convert it to JSON Lines")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--rag-dataset {path} can't be read ({error}): give a JSON or JSON Lines file") from error
    if text.lstrip().startswith("["):
        try:
            yield from ((f"record {n}", each) for n, each in enumerate(json.loads(text), 1))
        except ValueError as error:
            raise ConfigError(f"--rag-dataset {path} is no JSON list: {error}") from error
        return
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"--rag-dataset {path}, line {number} is no JSON: {error}") from error
            yield f"line {number}", record


def _case(record: Mapping[str, Any], place: int) -> Case:
    """Raises: ValueError, KeyError, TypeError or AttributeError for what is no case."""
    documents = tuple(filter(None, map(_document, _passages(_first(record, _DOCUMENTS)))))
    name = str(record.get("_id") or record.get("id") or place)
    asked = record.get("questions")
    if asked is None:
        questions = [_question(record, "question", name)]
    else:
        questions = [_question(each, each.get("kind", "question"), f"{name}.{n}") for n, each in enumerate(asked)]
    if not documents or not questions:
        raise ValueError("there must be documents and questions, all texts")
    return Case(documents, tuple(questions))


def _question(record: Mapping[str, Any], kind: Any, sample_id: str) -> Question:
    text, answers = _first(record, _QUESTION), _answers(record)
    if not all(each and isinstance(each, str) for each in (text, kind)):
        raise ValueError("there must be documents and questions, all texts")
    if not answers:
        raise ValueError("each question needs an answer")
    return Question(text.strip(), answers, kind, sample_id)


def _first(record: Mapping[str, Any], names: Sequence[str]) -> Any:
    """The first field of those that there is."""
    for name in names:
        if record.get(name):
            return record[name]
    raise KeyError(" or ".join(names))


def _passages(found: Any) -> Sequence[Any]:
    """HotpotQA has its titles and its sentences in two lists; the others have a list of passages."""
    if isinstance(found, Mapping):
        return list(zip(found["title"], found["sentences"], strict=True))
    if not isinstance(found, list):
        raise TypeError("documents are no list")
    return found


def _document(passage: Any) -> str:
    """A text, an object with title and text, or HotpotQA's pair of title and sentences."""
    if isinstance(passage, str):
        return passage.strip()
    if isinstance(passage, Mapping):
        title, text = passage.get("title", ""), passage.get("text") or passage.get("paragraph_text") or ""
    else:
        title, sentences = passage
        text = "".join(sentences)
    title, text = title.strip(), text.strip()
    return f"{title}\n{text}" if title else text


def _answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that are right, with other ways to write them."""
    found = _first(record, _ANSWERS)
    known = [found] if isinstance(found, str) else list(found)
    known += record.get("answer_aliases") or (record.get("extra") or {}).get("answer_aliases") or []
    if not all(isinstance(each, str) for each in known):
        raise TypeError("answers must be texts")
    return tuple(dict.fromkeys(filter(None, map(str.strip, known))))
