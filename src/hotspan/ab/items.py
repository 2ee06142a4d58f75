"""What both sides are asked: items of a file, or generated ones with an expected answer, and how answers are scored."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Literal, get_args

from hotspan.bench.prose import prose
from hotspan.core.documents import read_text
from hotspan.core.errors import ConfigError, did_you_mean

Match = Literal["exact", "contains", "regex", "json"]

_FIELDS: Final = ("id", "prompt", "messages", "max_tokens", "expected", "match", "field")
_WORDS: Final = (60, 260)
_CODE: Final = (1000, 9000)


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    messages:   of the chat, as the server gets them.
    max_tokens: of the answer; None takes --max-tokens.
    expected:   what a right answer is; None: it is not scored. `match` says how the two are compared.
    field:      of a JSON answer, its path: names and list positions with dots between them.
    """

    name: str
    messages: tuple[Mapping[str, Any], ...] = field(repr=False)
    max_tokens: int | None = None
    expected: Any = None
    match: Match = "exact"
    field: str = ""

    @property
    def prompt(self) -> str:
        """The messages as text, for people."""
        if len(self.messages) == 1 and isinstance(self.messages[0].get("content"), str):
            return str(self.messages[0]["content"])
        return "\n\n".join(f"{each.get('role')}: {_text(each.get('content'))}" for each in self.messages)

    def is_right(self, answer: str) -> bool:
        """Whether an answer is the expected one. White space around it does not count."""
        text = answer.strip()
        match self.match:
            case "exact":
                return text == str(self.expected).strip()
            case "contains":
                return str(self.expected) in text
            case "regex":
                return re.search(str(self.expected), text) is not None
            case "json":
                return _json_field(text, self.field) == (True, self.expected)


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _json_field(text: str, path: str) -> tuple[bool, Any]:
    """Whether an answer is JSON that has the field, and the field's value. A fence of Markdown around it is cut off."""
    fenced = re.fullmatch(r"```(?:json)?\s*(.*?)\s*```", text, re.DOTALL)
    try:
        value = json.loads(fenced[1] if fenced else text)
        for name in filter(None, path.split(".")):
            value = value[int(name)] if isinstance(value, list) else value[name]
    except (ValueError, KeyError, IndexError, TypeError):
        return False, None
    return True, value


def load_items(path: Path) -> list[Item]:
    """The items of a JSONL file. Raises: ConfigError that names file and line."""
    lines = read_text(path, "--set").splitlines()
    items = [_item(line, f"{path}:{number}", number) for number, line in enumerate(lines, 1) if line.strip()]
    if not items:
        raise ConfigError(f'--set {path} has no item: write one JSON object per line, such as {{"prompt": "..."}}')
    names = [item.name for item in items]
    if twice := next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None:
        raise ConfigError(f"--set {path}: the id {twice!r} is given twice: give each item its own, or none an id")
    return items


def _item(line: str, place: str, number: int) -> Item:
    try:
        given = json.loads(line)
        json.dumps(given, ensure_ascii=False).encode()  # half of a UTF-16 pair can't be written to any file
    except ValueError as error:
        raise ConfigError(f"{place} is no JSON: {error}") from error
    if not isinstance(given, dict):
        raise ConfigError(f'{place} is no JSON object: write one, such as {{"prompt": "..."}}')
    for name in given:
        if name not in _FIELDS:
            raise ConfigError(f"{place}: unknown field {name!r}: {did_you_mean(name, _FIELDS, ', '.join(_FIELDS))}")
    prompt, messages = given.get("prompt"), given.get("messages")
    if (prompt is None) == (messages is None):
        raise ConfigError(f"{place}: give either prompt or messages")
    if messages is None:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) and prompt else None
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise ConfigError(f"{place}: prompt is a text and messages a list of objects with role and content")
    most = given.get("max_tokens")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise ConfigError(f"{place}: max_tokens is {most!r}: give a whole number above 0")
    _check_expected(given, place)
    name = str(given.get("id", number))
    return Item(name, tuple(messages), most, given.get("expected"), given.get("match", "exact"), given.get("field", ""))


def _check_expected(given: Mapping[str, Any], place: str) -> None:
    match, known = given.get("match", "exact"), get_args(Match)
    if match not in known:
        raise ConfigError(f"{place}: match is {match!r}: give one of {', '.join(known)}")
    for name in ("match", "field"):
        if name in given and given.get("expected") is None:
            raise ConfigError(f"{place}: {name} has no effect without expected: add it")
    if not isinstance(given.get("field", ""), str) or ("field" in given and match != "json"):
        raise ConfigError(f'{place}: field is the path of a field, such as "result.city", for "match": "json"')
    if match == "regex":
        try:
            re.compile(str(given.get("expected")))
        except re.error as error:
            raise ConfigError(f"{place}: expected is no regular expression: {error}") from error


def generated_items(count: int, seed: int) -> list[Item]:
    """Questions about passages that are the same for a seed everywhere: each hides a code and asks for it."""
    rng = Random(seed)  # of its methods only random() is promised to repeat across versions
    items = []
    for number in range(count):
        words = _WORDS[0] + int(rng.random() * (_WORDS[1] - _WORDS[0]))
        sentences = prose(seed * 1_000_003 + number, words).split(". ")
        code = str(_CODE[0] + int(rng.random() * _CODE[1]))
        sentences.insert(int(rng.random() * len(sentences)), f"The code of shelf {number} is {code}")
        question = f"What is the code of shelf {number}? Begin with the code, then sum up the passage."
        content = f"{'. '.join(sentences)}\n\n{question}"
        items.append(Item(f"shelf-{number}", ({"role": "user", "content": content},), expected=code, match="contains"))
    return items


def shuffled(values: Sequence[Any], rng: Random) -> list[Any]:
    """The values in an order that is the same for a seed on every version of Python."""
    left = list(values)
    for at in range(len(left) - 1, 0, -1):
        other = int(rng.random() * (at + 1))
        left[at], left[other] = left[other], left[at]
    return left
