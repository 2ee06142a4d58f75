"""What an answer scores whose right answers are known.

Of an answer with `<final_answer>` tags, what the last complete ones enclose counts; of others, all of it.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Final

_FINAL_ANSWER: Final = re.compile(r"<final_answer>(.*?)(</final_answer>|\Z)", re.DOTALL | re.IGNORECASE)
_MARKS: Final = str.maketrans("", "", string.punctuation)
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")


def is_right(answer: str, known: Sequence[str]) -> bool:
    """Whether an answer has one of the known ones in it, in whatever case."""
    given = _final(answer).casefold()
    return any(each.casefold() in given for each in known)


def final_answer(answer: str) -> str:
    """What the last `<final_answer>` encloses, without spaces around it; "" without one, or if it has no end."""
    tagged = _FINAL_ANSWER.findall(answer)
    return str(tagged[-1][0]).strip() if tagged and tagged[-1][1] else ""


def token_f1(answer: str, known: Sequence[str]) -> float:
    """The best F1 of an answer's words against a known answer's, 0 to 1, as SQuAD's: without case, marks, articles."""
    given = _words(_final(answer))
    return max((_f1(given, _words(each)) for each in known), default=0.0)


def _final(answer: str) -> str:
    complete = [text for text, end in _FINAL_ANSWER.findall(answer) if end]
    return str(complete[-1]) if complete else answer


def _words(text: str) -> Counter[str]:
    return Counter(_ARTICLES.sub(" ", text.lower().translate(_MARKS)).split())


def _f1(given: Counter[str], known: Counter[str]) -> float:
    total = given.total() + known.total()
    return 2 * (given & known).total() / total if total else 1.0
