"""Sessions of agents: what is read of them, and replays in a closed loop."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from hotspan.cli.main import app
from hotspan.core.errors import ConfigError
from hotspan.core.trace import Request, Trace, opened, read, write
from hotspan.simulate.costs import Costs
from hotspan.simulate.shapes import sources
from hotspan.simulate.simulation import Simulation
from tests.simulate.rig import row, setup

SESSIONS = Path(__file__).parent / "agents" / "sessions.jsonl.xz"


def call(t: float, ids: list[int], **more: Any) -> dict[str, Any]:
    """An entry of a session: blocks of 256 tokens, answered within a second."""
    own = {"t": t, "in": 256 * len(ids) + 10, "out": 5, "hash_ids": ids, "stop": "tool_use", "api_time": 1.0}
    return own | {"think_time": 0.0} | more


def a_file(directory: Path, *sessions: list[dict[str, Any]], **more: Any) -> Path:
    """Sessions, one a line, that begin at once."""
    path = directory / "sessions.jsonl"
    fields = {"block_size": 256, "hash_id_scope": "local", "start_s": 0} | more
    path.write_bytes(b"\n".join(orjson.dumps(fields | {"requests": each}) for each in sessions))
    return path


def test_ids_are_of_their_session_and_of_all_before_them(tmp_path: Path) -> None:
    """Equal ids of two sessions are different keys; an id behind another prefix is another key."""
    path = a_file(tmp_path, [call(0, [1, 2]), call(1, [1, 3, 2])], [call(5, [1, 2])])
    first, second, other = read(path).requests
    assert first.keys[0] == second.keys[0] and len({*first.keys, *second.keys}) == 4
    assert not {*other.keys} & {*first.keys, *second.keys}
    assert first.session == second.session != other.session


def test_small_blocks_are_joined() -> None:
    """Four blocks of 64 tokens are one key of 256, of which each request has as many as fit."""
    trace = read(SESSIONS)
    assert trace.block_tokens == 256
    assert all(len(each.keys) == each.tokens // 256 for each in trace.requests)


def test_the_sample_is_as_its_readme_has_it() -> None:
    """40 sessions, three with sub-agents at least; answers end by tool calls mostly; an endless cache finds most."""
    facts = read(SESSIONS).facts()
    assert facts.sessions == 40 and facts.asked_before > 0.8
    assert facts.finish_reasons is not None and facts.finish_reasons["tool_calls"] > facts.requests / 2
    agents = {each.session for each in read(SESSIONS).requests if each.is_subagent}
    assert len(agents) >= 3
    with opened(SESSIONS) as file:
        assert not {"models", "model", "text", "content"} & {key for line in file for key in orjson.loads(line)}


def test_a_request_awaits_the_answer_before_it_and_sub_agents_that_had_ended(tmp_path: Path) -> None:
    """A sub-agent awaits its parent's request; the parent awaits it too if it had ended, and else goes on beside it."""
    quick = {"t": 2, "type": "subagent", "requests": [call(0, [8]), call(3, [8, 9], think_time=2.0)]}
    slow = {"t": 2, "type": "subagent", "requests": [call(0, [7], api_time=500.0)]}
    session = [call(0, [1]), quick, slow, call(10, [1, 2], think_time=9.0), call(12, [1, 2, 3], think_time=1.0)]
    found = read(a_file(tmp_path, session)).requests
    by_keys = {len(each.keys) + 10 * each.is_subagent: (n, each) for n, each in enumerate(found)}
    parent, helper = by_keys[1][0], by_keys[12][0]
    assert found[parent].after == () and by_keys[12][1].after and by_keys[12][1].think_s == 2.0
    assert next(each.after for each in found if each.is_subagent) == (parent,)
    assert by_keys[2][1].after == (parent, helper) and by_keys[2][1].think_s == 4.0  # the helper ended at 6
    assert by_keys[3][1].after == (by_keys[2][0],) and by_keys[3][1].think_s == 1.0


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ""])
def test_sessions_are_a_file_or_a_directory(tmp_path: Path, suffix: str) -> None:
    """One a line, one file that is indented, or a directory of these: the same requests are read."""
    session = [call(0, [1]), call(3, [1, 2], think_time=2.0)]
    lines = a_file(tmp_path, session)
    indented = tmp_path / "all" / "trace_0001.json"
    indented.parent.mkdir()
    indented.write_text(json.dumps(orjson.loads(lines.read_bytes()), indent=2))
    path = {".jsonl": lines, ".json": indented, "": indented.parent}[suffix]
    assert read(path).requests == read(lines).requests and read(path).is_closed
    assert sources([str(path)])[str(path)](1).requests == read(lines).requests


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"hash_id_scope": "global"}, "hash_id_scope"),
        ({"block_size": 3}, "block_size"),
        ({"requests": 3}, "requests is no list"),
        ({"requests": ["text"]}, "no JSON object"),
        ({"requests": [call(0, [1]) | {"in": 0}]}, "`in`"),
        ({"requests": [call(0, [1]) | {"hash_ids": ["a"]}]}, "hash_ids"),
        ({"requests": [call(0, [1, 2]) | {"in": 256}]}, "which are more"),
        ({"requests": [call(-1, [1])]}, "t is no number"),
        ({"start_s": "soon"}, "start_s"),
    ],
)
def test_what_is_wrong_with_a_session_is_said_with_its_line(tmp_path: Path, wrong: dict[str, Any], said: str) -> None:
    """A session that is not as it should be ends the reading, with the file, the line and the field."""
    fields = {"block_size": 256, "hash_id_scope": "local", "requests": [call(0, [1])]}
    path = tmp_path / "wrong.jsonl"
    path.write_bytes(orjson.dumps(fields) + b"\n" + orjson.dumps(fields | wrong))
    with pytest.raises(ConfigError, match=said) as error:
        read(path)
    assert f"{path}, line 2" in str(error.value)


def test_a_closed_loop_survives_a_file(tmp_path: Path) -> None:
    """Sessions that were written as rows are read as the same requests, with what they await and how they ended."""
    trace = read(SESSIONS, 200)
    write(tmp_path / "rows.jsonl", trace)
    again = read(tmp_path / "rows.jsonl")
    assert again.block_tokens == trace.block_tokens

    def told(each: Request) -> tuple[object, ...]:
        return each.keys, each.tokens, each.after, each.think_s, each.finish_reason, each.is_subagent

    assert [told(each) for each in again.requests] == [told(each) for each in trace.requests]
    assert len({each.session for each in again.requests}) == len({each.session for each in trace.requests})


def test_rows_with_sessions_and_durations_await_the_last_answer(tmp_path: Path) -> None:
    """As recorded of a server: a request awaits the last answer of its session that had ended, and nobody else's."""
    rows = [
        {"timestamp": at, "session": session, "duration_ms": took, "input_length": 600, "output_length": 1}
        | {"hash_ids": [1, 2], "finish_reason": "tool_calls"}
        for at, session, took in ((0, 1, 1000), (500, 2, 1000), (900, 1, 5000), (1600, 1, 100), (7000, 1, 100))
    ]
    path = tmp_path / "recorded.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    found = read(path).requests
    assert [each.after for each in found] == [(), (), (), (0,), (2,)]
    assert [round(each.think_s, 3) for each in found] == [0, 0, 0, 0.6, 1.1]
    path.write_bytes(orjson.dumps(rows[0] | {"session": "me"}))
    with pytest.raises(ConfigError, match="session"):
        read(path)
    path.write_bytes(orjson.dumps(rows[0] | {"after": [0]}))
    with pytest.raises(ConfigError, match="after"):
        read(path)


def test_a_closed_loop_waits_for_answers_and_pauses() -> None:
    """A request arrives when all that it awaits are answered and its client has thought, whatever the trace's times."""
    rows = (
        row(0.0, [1], answer_tokens=50),
        row(0.1, [2], answer_tokens=400),
        row(0.2, [1, 3])._replace(after=(0, 1), think_s=7.0),
        row(0.3, [4])._replace(after=(2,), think_s=0.5),
    )
    simulation = Simulation(setup(), "auto")
    simulation.run(Trace("closed", rows))
    jobs = simulation._jobs
    assert jobs[0].ended_s < jobs[1].ended_s
    assert jobs[2].arrived_s == pytest.approx(jobs[1].ended_s + 7.0)
    assert jobs[3].arrived_s == pytest.approx(jobs[2].ended_s + 0.5)


def test_slower_replicas_stretch_a_closed_loop_and_lose_no_request() -> None:
    """Of 40 sessions every request is answered, none before what it awaits, at a tenth of the speed, too."""
    trace = read(SESSIONS, 300)
    spans = []
    for rate in (80_000.0, 8_000.0):
        simulation = Simulation(setup(block_tokens=256, costs=Costs(prefill_tokens_per_s=rate)), "auto")
        outcome = simulation.run(trace)
        jobs = simulation._jobs
        assert len(outcome.ttft_s) == len(trace.requests)
        for job in jobs:
            assert all(jobs[each].ended_s <= job.arrived_s for each in job.request.after)
        spans.append(outcome.span_s)
    assert spans[0] < spans[1]


def test_faster_begins_sessions_sooner_and_keeps_pauses() -> None:
    """At ten times the rate sessions begin ten times sooner; think times and what is awaited stay."""
    trace = read(SESSIONS, 300)
    fast = trace.faster(10.0)

    def firsts(trace: Trace) -> list[float]:
        return [each.at_s for each in trace.requests if not each.after]

    assert firsts(fast) == pytest.approx([each / 10 for each in firsts(trace)])
    assert sorted(each.think_s for each in fast.requests) == sorted(each.think_s for each in trace.requests)
    for n, each in enumerate(fast.requests):
        assert all(other < n and fast.requests[other].session == each.session for other in each.after)


def test_trace_show_tells_what_a_trace_is_like() -> None:
    """`hotspan trace show` has the sessions and how answers ended, as JSON too."""
    shown = CliRunner().invoke(app, ["trace", "show", str(SESSIONS)])
    assert shown.exit_code == 0 and "40 sessions" in shown.output and "tool_calls" in shown.output
    facts = json.loads(CliRunner().invoke(app, ["trace", "show", str(SESSIONS), "--json"]).output)
    assert facts["sessions"] == 40 and facts["finish_reasons"]["tool_calls"] > 100
