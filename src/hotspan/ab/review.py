"""Different answers, blinded, for people to judge: each item draws which side is first; a second file keeps it."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from secrets import randbelow
from typing import Any, Final

from hotspan.ab.compare import Asked

FIELDS: Final = ("id", "prompt", "answer_1", "answer_2", "better")
"""`better` is empty: the reviewer writes 1, 2 or same."""

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def key_path(path: Path) -> Path:
    """The file with the sides of the answers in a review file."""
    return path.with_name(f"{path.stem}.key.json")


def write_review(path: Path, asked: Sequence[Asked]) -> None:
    """Write the items whose first answers differ, and beside it their key: the side of `answer_1` by id.

    The sides are not drawn by the run's seed, which a reviewer may know. In CSV, a cell that a spreadsheet would take
    for a formula begins with an apostrophe.
    """
    rows: list[dict[str, str]] = []
    key: dict[str, str] = {}
    for each in asked:
        if each.a.is_same(each.b):
            continue
        answers = {"A": each.a.record.answer, "B": each.b.record.answer}
        first, second = ("A", "B") if randbelow(2) else ("B", "A")
        key[each.item.name] = first
        values = (each.item.name, each.item.prompt, answers[first], answers[second], "")
        rows.append(dict(zip(FIELDS, values, strict=True)))
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, FIELDS)
            writer.writeheader()
            writer.writerows({name: _cell(text) for name, text in row.items()} for row in rows)
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    sides: dict[str, Any] = {"answer_1": key}
    key_path(path).write_text(json.dumps(sides, indent=1) + "\n")


def _cell(text: str) -> str:
    return f"'{text}" if text.startswith(_FORMULA) else text
