"""One question is shown with its answer, and modes that were disturbed are found."""

from typing import Any

import pytest

from hotspan.bench.counters import CacheCounters
from hotspan.bench.figures import paired_ttft
from hotspan.bench.records import BenchResult, RequestRecord, RoundName, RoundResult
from hotspan.bench.summary import summarize
from hotspan.bench.workloads.base import Prompt
from hotspan.demo.disturbed import disturbances
from hotspan.demo.shown import QUESTION, Shown, _source, about, lines, page_section

TITLES = {"none": "no hotspan", "ram": "RAM", "disk": "disk", "restart": "restarted", "bound": "bound"}


def shown(mode: str, source: str, ttft_s: float, answer: str = "It explains\nassignments.") -> Shown:
    return Shown(mode, TITLES[mode], source, ttft_s, 2048, 0 if source == "computed" else 1920, answer)


def test_the_question_is_about_a_document() -> None:
    """The text before a question of the workload, with the question that is shown in its place."""
    assert about(Prompt("q", "a text\n\nQuestion 1: Why?", 4), 9).content == f"a text\n\nQuestion 0: {QUESTION}"


def test_the_source_is_what_the_servers_counters_say() -> None:
    """The tier that most hit tokens came from; computed if the answer had none."""
    before = CacheCounters({"gpu": 100.0, "ram": 50.0}, 0.0)
    after = CacheCounters({"gpu": 116.0, "ram": 50.0, "disk": 1920.0}, 0.0)
    assert _source(before, after, 1936) == "disk"
    assert _source(before, after, 0) == "computed"
    assert _source(None, None, 16) == "a cache"


def test_answers_are_compared_with_the_computed_one() -> None:
    """Each mode's line says how much sooner it began and whether the words are the same; other words are shown."""
    found = lines([shown("none", "computed", 4.0), shown("ram", "RAM", 0.25), shown("disk", "disk", 0.5, "Else.")])
    assert found[1] == "  no hotspan (computed): first word after 4.00 s"
    assert found[2] == "  RAM (RAM): first word after 0.25 s, 16.0\u00d7 sooner, the same words"
    assert "8.0\u00d7 sooner, other words" in found[3]
    assert found[4:] == ["  the answer: It explains assignments.", "  but disk: Else."]
    page = page_section([shown("none", "computed", 4.0), shown("ram", "RAM", 0.25, "<b>")])
    assert "&lt;b&gt;" in page and "16.0\u00d7 sooner" in page


def test_answers_of_the_engines_own_cache_are_as_good() -> None:
    """Where that has other words than what is computed, a hit's are compared with it, and the reason is said."""
    own = shown("bound", "the engine's pool", 0.2, "Aliases.")
    found = lines([shown("none", "computed", 4.0), shown("ram", "RAM", 0.25, "Aliases."), own])
    assert found[2].endswith("16.0\u00d7 sooner, the same words as from vLLM's own prefix cache")
    assert found[3].endswith("20.0\u00d7 sooner, other words")
    assert found[4:6] == ["  the answer: It explains assignments.", "  vLLM's own prefix cache: Aliases."]
    assert "rounds differently" in found[6] and len(found) == 7
    found = lines([shown("none", "computed", 4.0), shown("ram", "RAM", 0.25, "Else."), own])
    assert "other words" in found[2] and found[7] == "  but RAM: Else."
    assert "rounds differently" in page_section([shown("none", "computed", 4.0), own])
    same = shown("bound", "the engine's pool", 0.2)
    assert "rounds differently" not in page_section([shown("none", "computed", 4.0), same])


def test_nothing_is_shown_without_a_computed_answer() -> None:
    """There is nothing to compare with."""
    assert lines([]) == [] == lines([shown("ram", "RAM", 0.25)]) and page_section([]) == ""


def result(warm_up_s: float | None, ttfts: list[float], pre_s: float = 1.0) -> BenchResult:
    """A run with these times, of one question for each time to first token."""
    rounds = []
    for name, took_s in ((RoundName.PRE_WARM_UP, pre_s), (RoundName.WARM_UP, warm_up_s), (RoundName.QUERY, 1.0)):
        if took_s is None:
            continue
        times = ttfts if name is RoundName.QUERY else [took_s]
        records = [RequestRecord(f"q{at}", at, True, 0.0, each, each) for at, each in enumerate(times)]
        rounds.append(RoundResult(name, summarize(records, took_s, None, None), tuple(records)))
    return BenchResult({}, tuple(rounds), "", "", {})


CALM: dict[str, Any] = {
    "none": result(20.0, [3.0] * 6),
    "ram": result(21.0, [0.2] * 6),
    "disk": result(22.0, [0.21] * 6),
    "restart": result(None, [0.22] * 6),
}


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ({}, []),
        ({"none": result(30.4, [3.0] * 6)}, ["none"]),
        ({"restart": result(None, [0.2] * 6, pre_s=2.5)}, ["restart"]),
        ({"ram": result(20.0, [0.25, 0.26, 0.25, 0.27, 0.25, 0.26])}, ["ram"]),
        ({"ram": result(20.0, [0.215] * 6)}, []),
    ],
    ids=["calm", "cold round", "restarted", "RAM slower than disk", "RAM as fast"],
)
def test_a_disturbed_mode_is_found(changed: dict[str, BenchResult], found: list[str]) -> None:
    """By the same cold work that took longer, by its pre-warm-up where there is none, and by RAM slower than disk."""
    played = CALM | changed
    assert [each.mode for each in disturbances(played, TITLES)] == found


def test_fast_rounds_are_not_judged() -> None:
    """Milliseconds are noise."""
    played = {"none": result(0.01, [0.01] * 6, 0.01), "ram": result(0.3, [0.02] * 6, 0.3)}
    assert disturbances(played, TITLES) == []


def test_the_interval_of_a_ratio_is_over_questions() -> None:
    """It has the ratio of the means within; it is a point where all questions gain alike; few questions have none."""
    slow, fast = [2.0, 4.0, 6.0, 8.0, 3.0], [1.0, 1.0, 2.0, 2.0, 1.0]
    found = paired_ttft((result(1, slow),), (result(1, fast),))
    assert found is not None and found.low is not None and found.high is not None
    assert found.mean == pytest.approx(23 / 7) and found.low < found.mean < found.high
    alike = paired_ttft((result(1, [2 * each for each in fast]),), (result(1, fast),))
    assert alike == (2.0, 2.0, 2.0)
    assert paired_ttft((result(1, [2.0]),), (result(1, [1.0]),)) == (2.0, None, None)
