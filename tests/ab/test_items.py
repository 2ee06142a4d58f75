"""Items of files and generated ones, how answers are scored, and the order in which sides are asked."""

from pathlib import Path
from typing import Any

import pytest

from hotspan.ab.items import generated_items, load_items
from hotspan.ab.schedule import Visit, in_turn, interleaved, pilot_items
from hotspan.core.errors import ConfigError

from .answers import item


def test_a_file_has_prompts_or_messages(tmp_path: Path) -> None:
    """A prompt is a user's message; names are the ids or the lines; empty lines are none."""
    path = tmp_path / "set.jsonl"
    path.write_text(
        '{"prompt": "Hi", "max_tokens": 3}\n\n'
        '{"id": "m", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]}\n'
    )
    first, second = load_items(path)
    assert (first.name, first.max_tokens, first.prompt) == ("1", 3, "Hi")
    assert (second.name, second.prompt) == ("m", "system: S\n\nuser: U")


@pytest.mark.parametrize(
    "line, said",
    [
        ("nonsense", "set.jsonl:1 is no JSON"),
        ('["x"]', "no JSON object"),
        (r'{"prompt": "\ud83d"}', "surrogates not allowed"),
        ('{"prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"prompt": ""}', "prompt is a text"),
        ('{"prompt": "a", "max_token": 3}', "did you mean"),
        ('{"prompt": "a", "max_tokens": 0}', "whole number above 0"),
        ('{"prompt": "a", "expected": "b", "match": "fuzzy"}', "exact, contains, regex, json"),
        ('{"prompt": "a", "match": "exact"}', "without expected"),
        ('{"prompt": "a", "expected": "(", "match": "regex"}', "no regular expression"),
        ('{"prompt": "a", "expected": "b", "field": "x"}', '"match": "json"'),
        ('{"id": "x", "prompt": "a"}\n{"id": "x", "prompt": "b"}', "'x' is given twice"),
        ("", "no item"),
    ],
)
def test_errors_name_file_line_and_remedy(line: str, said: str, tmp_path: Path) -> None:
    """What can't be asked is refused before anything is."""
    path = tmp_path / "set.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=r"set\.jsonl") as refused:
        load_items(path)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "match, field, expected, answer, is_right",
    [
        ("exact", "", "Paris", " Paris\n", True),
        ("exact", "", "Paris", "Paris.", False),
        ("exact", "", 4, "4", True),
        ("contains", "", "Paris", "It is Paris.", True),
        ("regex", "", r"\b4[0-9]\b", "about 42 of them", True),
        ("regex", "", r"^4", "about 42", False),
        ("json", "city.name", "Paris", '```json\n{"city": {"name": "Paris"}}\n```', True),
        ("json", "cities.1", "Rome", '{"cities": ["Paris", "Rome"]}', True),
        ("json", "cities.2", "Rome", '{"cities": ["Paris", "Rome"]}', False),
        ("json", "n", 3, '{"n": "3"}', False),
        ("json", "", {"a": 1}, '{"a": 1}', True),
        ("json", "a", 1, "not JSON", False),
    ],
)
def test_scores(match: Any, field: str, expected: Any, answer: str, is_right: bool) -> None:
    """Exact text, a part of it, a pattern, or a field of JSON."""
    assert item(expected=expected, match=match, field=field).is_right(answer) is is_right


def test_generated_items_are_the_same_for_a_seed_and_have_their_answer() -> None:
    """Each passage holds the code that is asked for, once; another seed makes other passages."""
    items = generated_items(20, 7)
    assert items == generated_items(20, 7)
    assert {each.prompt for each in items}.isdisjoint(each.prompt for each in generated_items(20, 8))
    for each in items:
        assert f"is {each.expected}" in each.prompt and each.is_right(f"{each.expected}: the passage ...")


def test_a_schedule_asks_each_item_twice_of_each_side() -> None:
    """Every item has four visits; A's own come first, for the pilot, before B is asked anything."""
    phases = list(interleaved(300, 5))
    visits = [visit for phase in phases for visit in phase.visits]
    assert sorted(visits, key=str) == sorted(
        (Visit(at, side, turn) for at in range(300) for side in ("A", "B") for turn in (1, 2)), key=str
    )
    pilot = phases[0].visits
    assert {visit.side for visit in pilot} == {"A"} and len(pilot) == 2 * pilot_items(300) == 100
    assert phases == list(interleaved(300, 5)) and phases != list(interleaved(300, 6))


def test_sides_take_turns_in_an_order_that_is_drawn() -> None:
    """In a block both sides' first visits of an item are neighbours, A first about as often as B; then the second."""
    blocks = list(interleaved(500, 1))[2:]
    first = 0
    for block in blocks:
        turns = [visit.turn for visit in block.visits]
        assert turns == sorted(turns)
        for one, two in zip(block.visits[::2], block.visits[1::2], strict=True):
            assert one.item == two.item and {one.side, two.side} == {"A", "B"}
            first += one.side == "A"
    assert 370 < first < 530, "of 900 pairs"
    assert [phase.title for phase in in_turn(3, 1)] == ["A", "B"]
