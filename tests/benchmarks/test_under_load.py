"""The parts of benchmarks/under_load.py, of its model and of its texts that need no engine and no package."""

import asyncio
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import real_texts
from benchmarks.harness import arguments
from benchmarks.load import always
from benchmarks.load.figures import HEADS, figures_of, median, moved, quantiles, steps_between, table
from benchmarks.load.measure import Point, Setting, prioritise
from benchmarks.load.rounds import Arrivals, Clients, Plays, Thinking
from benchmarks.load.systems import NAMES, TIERS, systems
from benchmarks.load.workloads import SHAPES, Agents, Conversations, Documents, Passages, Turn, Workload, drawn
from benchmarks.peers.systems import SYSTEMS, System, in_files
from benchmarks.under_load import CLIENTS, SHARES, Comparison, points_of
from hotspan.bench import counters
from hotspan.bench.records import RequestRecord
from hotspan.bench.workloads.base import Prompt
from hotspan.config.settings import CacheOptions
from hotspan.core.aftermath import Aftermath
from hotspan.core.errors import ConfigError
from hotspan.demo.plan import EngineSettings

PAGE = """# HELP hotspan_cost_requests_total Requests.
hotspan_cost_requests_total{choice="loaded",engine="0",model_name="m"} %s
hotspan_cost_requests_total{choice="refused",engine="0",model_name="m"} 3.0
hotspan_cache_hit_tokens_total{engine="0",tier="disk"} %s
hotspan_cache_lookup_tokens_total{engine="0"} 900
vllm:prefix_cache_queries_total{engine="0"} 900
vllm:prefix_cache_hits_total{engine="0"} 100
"""

PIECES = [" ".join(f"{name}{word}" for word in range(220)) for name in "abcdefghijkl"]
"""Of 220 tokens, if a word is one."""

WORKLOADS: dict[str, Callable[[], Workload]] = {
    "chat": lambda: Conversations(PIECES),
    "agents": lambda: Agents(PIECES, json.loads(SHAPES.read_text())),
    "uniform": lambda: Documents([f"text {n}" for n in range(60)], 1024),
    "zipf": lambda: Documents([f"text {n}" for n in range(60)], 1024, "zipf"),
}


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS)
def test_the_same_seed_asks_the_same_in_the_same_order(make: Callable[[], Workload]) -> None:
    """Another seed, or another point of the same server, asks something else; each request has an id of its own."""
    first = make().stretch(1, 50, 7)
    assert first == make().stretch(1, 50, 7)
    assert len(first.turns) == 50 == len(names(first.turns))
    later = make().stretch(2, 50, 7)
    assert not names(first.turns) & names(later.turns)
    for other in (make().stretch(1, 50, 8), later):
        assert [turn.prompt.messages for turn in first.turns] != [turn.prompt.messages for turn in other.turns]


def names(turns: Sequence[Turn]) -> set[str]:
    return {turn.prompt.request_id for turn in turns}


@pytest.mark.parametrize("name", ["chat", "agents"])
def test_each_turn_of_a_session_begins_with_the_one_before(name: str) -> None:
    """So that all of a prompt but its last message may be a hit; sessions share at most their tools."""
    sessions: dict[str, list[Turn]] = {}
    for turn in WORKLOADS[name]().stretch(0, 120, 7).turns:
        sessions.setdefault(turn.session, []).append(turn)
    for turns_of in sessions.values():
        for before, after in pairwise(turns_of):
            asked = before.prompt.messages
            assert after.prompt.messages[: len(asked)] == asked
            assert after.prompt.messages[len(asked)].role == "assistant"
    firsts = [next(m for m in turns_of[0].prompt.messages if m.role == "user") for turns_of in sessions.values()]
    assert len(set(firsts)) == len(sessions) > 10


@pytest.mark.parametrize("make", WORKLOADS.values(), ids=WORKLOADS)
def test_no_request_is_longer_than_the_workload_says(make: Callable[[], Workload]) -> None:
    """Nor are all texts of a point together: tiers that hold them all are sized by that."""
    workload = make()
    stretch, most = workload.stretch(0, 400, 7), dict[str, int]()
    for turn in stretch.turns:
        words = sum(len(message.content.split()) for message in turn.prompt.messages)
        assert words <= workload.request_tokens
        most[turn.session] = max(most.get(turn.session, 0), words)
    for prompt in stretch.fill:
        assert len(prompt.content.split()) <= workload.fill_tokens
    if not isinstance(workload, Documents):
        assert sum(most.values()) <= workload.tokens(1)


def test_a_passage_has_about_as_many_tokens_as_asked_for() -> None:
    """Whole pieces, and of the last one a part by its words; the next passage goes on with another piece."""
    passages = Passages(PIECES, 220, 11)
    assert passages.next(220) == PIECES[11]
    assert passages.next(220 + 11) == PIECES[0] + " ".join(PIECES[1].split()[:11])
    assert passages.next(1) == "c0"


def test_documents_are_asked_about_once_before_the_first_point() -> None:
    """The points after the first find the caches as the one before left them."""
    workload = WORKLOADS["uniform"]()
    fill = workload.stretch(0, 5, 1).fill
    assert [prompt.content.split("\n")[0] for prompt in fill] == [f"text {n}" for n in range(60)]
    assert workload.stretch(1, 5, 1).fill == ()


def test_popularity_is_uniform_or_zipfs() -> None:
    """By Zipf's law the most frequent of 60 texts is asked for 21 % of the time, the second for half as often."""
    from random import Random

    rng = Random(1)
    even, skewed = (Counter(drawn(rng, 60_000, 60, how)).most_common() for how in ("uniform", "zipf"))
    assert len(even) == len(skewed) == 60
    assert even[0][1] < 1.2 * even[-1][1]
    assert skewed[0][1] == pytest.approx(12_800, rel=0.05)
    assert skewed[1][1] == pytest.approx(6_400, rel=0.05)


class Server:
    """Answers in the order in which it was asked, when it is told to; counts what it has at a time."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.due: list[float | None] = []
        self.at_a_time = self.most = 0
        self.sessions: Counter[str] = Counter()

    async def send(self, prompt: Prompt, due_time: float | None = None) -> RequestRecord:
        self.asked.append(prompt.request_id)
        self.due.append(due_time)
        session = prompt.request_id.split(".")[0]
        self.at_a_time += 1
        self.sessions[session] += 1
        assert self.sessions[session] == 1, "a session asks one thing at a time"
        self.most = max(self.most, self.at_a_time)
        for _ in range(3 + len(self.asked) % 4):
            await asyncio.sleep(0)
        self.at_a_time -= 1
        self.sessions[session] -= 1
        return record(prompt.request_id)


def turns(sessions: int, each: int, think_s: float = 0.0) -> list[Turn]:
    """The sessions' first turns, then their second ones."""
    return [
        Turn(Prompt(f"s{session}.{turn}", "text", 4), f"s{session}", think_s)
        for turn in range(each)
        for session in range(sessions)
    ]


def played(plays: Plays) -> Server:
    server = Server()
    asyncio.run(plays.play(server.send, lambda: 0.0))
    return server


def test_clients_wait_for_their_answers() -> None:
    """As many requests run as there are clients, in the order given, and no session has two at a time."""
    server = played(Clients(turns(8, 3), 4))
    assert server.most == 4
    assert server.asked == [turn.prompt.request_id for turn in turns(8, 3)]
    assert played(Clients(turns(1, 5), 4)).most == 1


def test_thinking_clients_play_their_sessions_one_after_the_other() -> None:
    """Each turn of a session comes after the one before it, and as many sessions go on as there are clients."""
    server = played(Thinking(turns(6, 3), 2))
    assert server.most == 2 and len(server.asked) == 18
    for session in range(6):
        assert [name for name in server.asked if name.startswith(f"s{session}.")] == [
            f"s{session}.{turn}" for turn in range(3)
        ]


def test_arrivals_are_due_at_the_same_times_for_the_same_seed() -> None:
    """They wait for no answer but those of their session, and a request knows when it was due."""
    first, again, other = (played(Arrivals(turns(8, 3), 1e5, seed)).due for seed in (3, 3, 4))
    assert first == again != other
    assert None not in first and len(first) == 24


def test_points_are_all_or_those_that_were_asked_for() -> None:
    """Clients have 60, 120 and 200 requests for 1, 3 and 8; either option alone leaves out the other."""
    assert [each.clients for each in points_of(None, None, 0)] == [*CLIENTS, *[0] * len(SHARES)]
    assert [each.requests for each in points_of([1, 3, 8], None, 0)] == [60, 120, 200]
    assert points_of(None, [0.8], 5) == [Point(5, share=0.8)]
    assert points_of([8], [], 60) == [Point(60, clients=8)]


def test_flags_may_have_several_values_or_none() -> None:
    """A flag of list[int] is None if it is not given."""
    given = arguments("", ["--clients", "1", "8", "--arrivals"], clients=list[int], arrivals=list[float])
    assert (given.clients, given.arrivals) == ([1, 8], [])
    assert arguments("", [], clients=list[int]).clients is None


def test_quantiles_interpolate_between_the_sample() -> None:
    """Of 0 to 100 the 95th percentile is 95; of nothing there is none."""
    assert quantiles(range(101), 50, 95, 99) == {"p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert quantiles([1.0, 2.0], 50) == {"p50": 1.5}
    assert quantiles([], 50) == {"p50": None}


def record(request_id: str, ttft: float = 1.0, **more: Any) -> RequestRecord:
    answer = more.pop("answer", "yes")
    given = {"num_input_tokens": 100, "num_output_tokens": 4, "cached_tokens": 80, "inter_token_s": (0.1, 0.3)} | more
    return RequestRecord(request_id, 0, True, 10.0, 10.0 + ttft, 12.0, answer=answer, **given)


def test_figures_are_those_of_the_answered_requests() -> None:
    """A failure counts as one, and in nothing else; TTFT is from when a request was due."""
    records = [record("a"), record("b", 2.0, due_time=9.0), record("c", answer="no")]
    records.append(replace(records[0], request_id="d", successful=False, error="HTTP 500"))
    figures = figures_of(records, 2.0, 5.0, PAGE % (1, 0), PAGE % (3, 160), {"a": "yes", "c": "yes"})
    assert (figures["requests"], figures["failed"], figures["errors"]) == (4, 1, ["HTTP 500"])
    assert (figures["requests_per_s"], figures["tokens_per_s"], figures["hit"]) == (1.5, 156.0, 0.8)
    assert figures["ttft_s"]["p50"] == 1.0 and figures["ttft_s"]["p99"] == pytest.approx(2.96)
    assert (figures["loaded"], figures["refused"], figures["hit_tokens"]) == (2.0, 0, {"disk": 160.0})
    assert (figures["compared"], figures["differing"]) == (2, 1)


def test_counters_are_told_apart_by_their_own_labels() -> None:
    """Engine and model are left out, counters that stood still too."""
    assert moved(PAGE % (1, 5), PAGE % (4, 5)) == {'hotspan_cost_requests_total{choice="loaded"}': 3.0}
    assert moved("", PAGE % (0, 0))["hotspan_cache_lookup_tokens_total"] == 900.0


def test_steps_are_counted_over_all_engines() -> None:
    """Those between two pages; none where a server does not tell."""
    page = "".join(f'vllm:iteration_tokens_total_count{{engine="{n}"}} %s\nvllm:other_count 5\n' for n in range(2))
    assert steps_between(page % (10, 1), page % (30, 2.0)) == 21 and steps_between("", "") == 0


def test_medians_are_taken_figure_by_figure() -> None:
    """Of what is in tables below, too; a counter that moved in one round alone is its own median."""
    runs: Sequence[dict[str, Any]] = [
        {"wall_s": 3.0, "ttft_s": {"p50": 1.0}, "metrics": {"a": 1.0}},
        {"wall_s": 1.0, "ttft_s": {"p50": 3.0, "p99": None}, "metrics": {}},
        {"wall_s": 2.0, "ttft_s": {"p50": 2.0}, "metrics": {"a": 3.0}},
    ]
    assert median(runs) == {"wall_s": 2.0, "ttft_s": {"p50": 2.0, "p99": None}, "metrics": {"a": 2.0}}


def test_the_table_has_a_row_for_each_system_at_each_point() -> None:
    """One that could not be measured says why, in as many cells as the others."""
    figures = figures_of([record("a")], 2.0, 5.0, PAGE % (1, 0), PAGE % (3, 80), {"a": "yes"})
    shown = table({"8 clients": {"a": figures, "b": {"error": "not ready"}}}, {"a": "A", "b": "B"}).splitlines()
    assert shown[1] == "8 clients"
    row = "| A | 80% | 2.0 | 5.0 | 0.50 | 52 | 1.00 / 1.00 / 1.00 | 200 / 298 | disk 80% | 2, 0, 0 | 0 | 0 of 1 |"
    assert shown[5] == row and "not ready" in shown[6]
    assert {line.count("|") for line in shown[3:]} == {len(HEADS) + 1}


@pytest.mark.parametrize("tier", TIERS)
def test_hotspan_has_the_tier_that_was_asked_for(tier: str) -> None:
    """Always and as-it-is differ in the cost model alone; never has no lower tier."""
    found = systems(tier)
    assert set(NAMES) <= set(found)
    assert replace(found["hotspan"], title="", program=()) == replace(found["hotspan-always"], title="", program=())
    assert found["hotspan"].arguments is SYSTEMS[f"hotspan-{tier}"].arguments
    assert found["hotspan-never"].beside is None


def test_always_takes_the_cost_model_out() -> None:
    """The settings are the options' own but for the patience."""
    options = CacheOptions(ram_gib=0.5)
    assert always.settings(options) == replace(options.settings(), patience_s=always.PATIENCE_S)


class Words:
    """A tokenizer of words, whose token of two words alone is another one than in a text."""

    def encode(self, text: str) -> Sequence[int]:
        return [int(word) for word in text.split()] + ([0] if text.startswith("4 ") else [])

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))


def test_pieces_of_a_text_have_exactly_so_many_tokens() -> None:
    """They do not overlap; where one would have another number of tokens by itself, the next begins one later."""
    found = list(real_texts.pieces(" ".join(map(str, range(1, 12))), 3, Words()))
    assert found == ["1 2 3", "5 6 7", "8 9 10"]


def test_html_and_text_become_plain_text(tmp_path: Path) -> None:
    """Tags, scripts and repeated spaces and lines are left out; references become characters."""
    page = tmp_path / "page.html"
    page.write_text(
        "<html><head><title>T</title></head><body><p>a &amp;  b</p>\n\n\n\n<script>x</script>c</body></html>"
    )
    assert real_texts._plain(page) == "a & b\n\nc"


def test_texts_without_debians_tools_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the package and the tool that is missing."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="debian-reference-en, and there is no apt-get here"):
        real_texts._text(tmp_path, "debian-reference-en")


def test_a_group_and_its_session_get_the_nice_value() -> None:
    """So that the processes that a server starts have it, whatever Linux shares the CPU by."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        prioritise(process.pid, 5)
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == 5
        session = Path(f"/proc/{process.pid}/autogroup")
        assert not session.exists() or session.read_text().split()[-1] == "5"


def test_a_whole_comparison(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds over stand-ins: every system has all points in each, and the answers are held to the engine's own.

    One that does not start has the reason in each point; nothing is left of what they stored.
    """
    monkeypatch.setattr(counters, "_WINDOW_S", 0.02)
    fake = ("tests.demo.fake_hotspan", "serve")
    ours = System(title="ours", program=fake, store=in_files, arguments=lambda place: ("--drifts",))
    dies = System(title="dies", program=fake, arguments=lambda place: ("--dies",))
    names = ("ours", "none", "dies")
    options = SimpleNamespace(tier="disk", systems=names, rounds=2, dtype="float32", ram_gib=0.4, peers_ram_gib=0.6)
    points = [Point(6, clients=2), Point(4, share=0.5)]
    with Aftermath() as aftermath:
        engine = EngineSettings(max_model_len=1024, threads=2, dtype="float32")
        setting = Setting(engine, WORKLOADS["uniform"](), points, 7, 60.0, aftermath)
        comparison = Comparison(options, tmp_path / "model", setting, tmp_path)
        comparison.systems = {"ours": ours, "dies": dies, "none": System(title="none", program=fake)}
        comparison.run()
    medians = comparison.medians()
    assert [*medians] == ["2 clients", "arrivals at 0.5 of the engine's own throughput"]
    for point, rows in medians.items():
        assert [*rows] == [*names] and len(comparison.rounds[point]["ours"]) == 2
        assert rows["ours"]["requests"] == rows["ours"]["differing"] == (6 if "clients" in point else 4)
        assert (rows["ours"]["failed"], rows["none"]["failed"]) == (0, 0)
        assert "not ready" in rows["dies"]["error"]
    assert comparison.capacity_per_s > 0
    assert {path.name for path in tmp_path.iterdir()} == {
        "capacity",
        *(f"{name}-{n}" for name in names for n in (0, 1)),
    }
    assert not list(tmp_path.glob("*/store"))
