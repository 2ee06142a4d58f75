"""Traces: files in Mooncake's format, and shapes that are like the published ones."""

import json
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotspan.core.errors import ConfigError
from hotspan.core.trace import BLOCK_TOKENS, Trace, read, write
from hotspan.simulate.shapes import SHAPES, sources
from tests.simulate.rig import row, workload

PUBLISHED = {  # requests, seconds, tokens in, tokens out, blocks asked for before
    "conversation": (12_031, 3_537, 12_035, 343, 0.366),
    "synthetic": (3_993, 1_022, 15_325, 149, 0.64),
    "toolagent": (23_608, 3_537, 8_596, 182, 0.553),
    "documents": (6_000, 2_000, 11_850, 180, 0.29),  # made up
}
GOOD = {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shapes_are_like_the_published_ones(name: str) -> None:
    """Requests, time, lengths, answers and what an endless cache would find are as listed, over a few seeds."""
    requests, span_s, tokens, answer_tokens, asked_before = PUBLISHED[name]
    facts = [SHAPES[name].draw(seed).facts() for seed in (1, 2, 3)]
    for each in facts:
        assert each.requests == pytest.approx(requests, abs=1)
        assert each.span_s == pytest.approx(span_s, abs=6)
    assert statistics.mean(each.mean_tokens for each in facts) == pytest.approx(tokens, rel=0.06)
    assert statistics.mean(each.mean_answer_tokens for each in facts) == pytest.approx(answer_tokens, rel=0.05)
    assert statistics.mean(each.asked_before for each in facts) == pytest.approx(asked_before, abs=0.02)


@pytest.mark.parametrize("name", ["conversation", "toolagent"])
def test_fewer_requests_over_the_same_time_are_like_the_published_ones(name: str) -> None:
    """Median length and reuse come out as published, and 24 to 42 % of the blocks are reused, whatever the seed."""
    published = SHAPES[name].published
    for seed in (1, 2, 3):
        facts = SHAPES[name].draw(seed, scale=0.5).facts()
        assert facts.requests == pytest.approx(published.requests / 2, rel=0.001)
        assert facts.median_tokens == pytest.approx(published.median_tokens, rel=0.1)
        assert facts.mean_tokens == pytest.approx(published.mean_tokens, rel=0.15)
        assert facts.asked_before == pytest.approx(published.asked_before, abs=0.05)
        assert facts.reused is not None and 0.24 <= facts.reused <= 0.42


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_are_whole_blocks_of_chains(name: str) -> None:
    """A block follows the same block in every request; requests have as many as fit their tokens, in order of time."""
    parents: dict[int, int | None] = {}
    trace = SHAPES[name].draw(1, scale=0.05)
    for each in trace.requests:
        assert len(each.keys) == each.tokens // BLOCK_TOKENS
        for n, key in enumerate(each.keys):
            assert parents.setdefault(key, each.keys[n - 1] if n else None) == (each.keys[n - 1] if n else None)
    times = [each.at_s for each in trace.requests]
    assert times == sorted(times) and times[0] >= 0


def test_conversations_share_their_first_block() -> None:
    """Every request of a conversation begins with the same system prompt; sessions are told apart all the same."""
    rows = SHAPES["conversation"].draw(1, 2000).requests
    assert len({each.keys[0] for each in rows if each.keys}) == 1
    assert len({each.session for each in rows}) > 500


@pytest.mark.parametrize("name", PUBLISHED)
def test_sessions_are_those_who_share_a_beginning(name: str) -> None:
    """Two requests are of one session if their first block past the system prompts is the same."""
    rows = [each for each in SHAPES[name].draw(1, 3000).requests if len(each.keys) > 20]
    by_session: dict[bytes, set[int]] = {}
    for each in rows:
        by_session.setdefault(each.session, set()).add(int.from_bytes(each.session, "big"))
        assert int.from_bytes(each.session, "big") in each.keys
    assert len(by_session) > len(rows) / 10


@pytest.mark.parametrize("name", PUBLISHED)
def test_more_or_fewer_requests_come_at_the_same_rate(name: str) -> None:
    """`requests` makes a trace longer or shorter and leaves its rate as it is."""
    published = SHAPES[name].published.requests / PUBLISHED[name][1]
    for requests in (2_000, 30_000):
        facts = SHAPES[name].draw(1, requests).facts()
        assert facts.requests == pytest.approx(requests, abs=2)
        assert facts.requests / facts.span_s == pytest.approx(published, rel=0.1)


def test_a_trace_follows_from_its_seed() -> None:
    """The same seed gives the same workload, another seed another."""
    for shape in SHAPES.values():
        assert shape.draw(7, 300) == shape.draw(7, 300) != shape.draw(8, 300)


@given(
    rows=st.lists(
        st.tuples(st.integers(0, 10_000), st.lists(st.integers(0, 2**64 - 1), max_size=5), st.integers(1, 511)),
        min_size=1,
        max_size=8,
    )
)
def test_what_is_written_is_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, list[int], int]]
) -> None:
    """A file gives back the requests that were written to it."""
    rows.sort(key=lambda each: each[0])
    made = workload(
        *(row(at_ms / 1000, keys, more=more)._replace(partial=n) for n, (at_ms, keys, more) in enumerate(rows))
    )
    path = tmp_path_factory.mktemp("trace") / "made.jsonl"
    write(path, made)
    assert [each._replace(session=b"") for each in read(path).requests] == list(made.requests)


def test_a_drawn_trace_survives_a_file(tmp_path: Path) -> None:
    """A drawn trace that was written replays as the same requests in the same sessions, with the same sections."""
    for name in ("synthetic", "documents"):
        made = SHAPES[name].draw(3, 200)
        write(tmp_path / f"{name}.jsonl", made)
        read_back = read(tmp_path / f"{name}.jsonl")
        assert [each[1:] for each in read_back.requests] == [each[1:] for each in made.requests]
        assert all(abs(a.at_s - b.at_s) <= 0.0005 for a, b in zip(read_back.requests, made.requests, strict=True))
        assert isinstance(read_back, Trace) and read_back.name == name


def test_it_reads_as_far_as_it_is_asked(tmp_path: Path) -> None:
    """Lines beyond the requests asked for are not looked at; a partial block is not compared; empty lines are none."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(GOOD | {"timestamp": 2500}) + "\nnonsense\n")
    rows = read(path, 2).requests
    assert [(each.at_s, each.tokens, each.answer_tokens, each.keys, each.partial) for each in rows] == [
        (0.0, 1100, 5, (0, 1), 2),
        (2.5, 1100, 5, (0, 1), 2),
    ]
    with pytest.raises(ConfigError, match="line 4: is no JSON"):
        read(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: is no JSON"),
        ("[]", "line 2: is no JSON object"),
        (json.dumps(GOOD | {"input_length": 0}), "line 2: input_length"),
        (json.dumps(GOOD | {"input_length": "7"}), "line 2: input_length"),
        (json.dumps(GOOD | {"output_length": -1}), "line 2: output_length"),
        (json.dumps(GOOD | {"output_length": True}), "line 2: output_length"),
        (json.dumps(GOOD | {"hash_ids": [0, 1.5, 2]}), "line 2: hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [0, -1]}), "line 2: hash_ids"),
        (json.dumps(GOOD | {"hash_ids": None}), "line 2: hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [0]}), "line 2: 1 hash_ids do not name the 512-token blocks of 1100 tokens"),
        (json.dumps(GOOD | {"hash_ids": [0, 1, 2, 3]}), "line 2: 4 hash_ids"),
        (json.dumps(GOOD | {"timestamp": None}), "line 2: timestamp"),
        (json.dumps({"timestamp": 1}), "line 2: input_length"),
        (json.dumps(GOOD | {"sections": 7}), r"line 2: sections has 7: give \[start, tokens, id\]"),
        (json.dumps(GOOD | {"sections": [[0, 5]]}), "line 2: sections"),
        (json.dumps(GOOD | {"sections": [[0, 0, 1]]}), "line 2: sections"),
        (json.dumps(GOOD | {"sections": [[0, 5, -1]]}), "line 2: sections"),
        (json.dumps(GOOD | {"sections": [[0, 5, 1.5]]}), "line 2: sections"),
        (json.dumps(GOOD | {"sections": [[1000, 101, 1]]}), "line 2: sections"),
        (json.dumps(GOOD | {"sections": [[0, 5, 1], [4, 5, 2]]}), "line 2: sections"),
        (json.dumps(GOOD), "line 2: is earlier than the line before"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """What is wrong with a file is said with the number of the line."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD | {"timestamp": 5}) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=message):
        read(path)


def test_a_file_that_is_none_is_an_error(tmp_path: Path) -> None:
    """A name that is neither a shape nor a file, and a file without requests, say so."""
    with pytest.raises(ConfigError, match="give one of conversation, synthetic, toolagent, documents, or a file"):
        sources(["conversatoin"])
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="has no requests"):
        sources([str(tmp_path / "empty")])
    with pytest.raises(ConfigError, match="toolagent has no requests"):
        SHAPES["toolagent"].draw(1, 1)


def test_a_rate_scale_squeezes_time(tmp_path: Path) -> None:
    """The same requests come in a third of the time, out of a file and out of a shape."""
    write(tmp_path / "made.jsonl", workload(row(0, [1]), row(6, [2])))
    made = sources([str(tmp_path / "made.jsonl"), "synthetic"], None, 3.0)
    assert [each.at_s for each in made[str(tmp_path / "made.jsonl")](1).requests] == [0.0, 2.0]
    slow, fast = sources(["synthetic"], 50)["synthetic"](4), sources(["synthetic"], 50, 2.0)["synthetic"](4)
    assert [each.at_s / 2 for each in slow.requests] == [each.at_s for each in fast.requests]
    assert all(len(each.keys) <= each.tokens / BLOCK_TOKENS for each in fast.requests)


def test_blocks_of_another_size(tmp_path: Path) -> None:
    """Rows may say how many tokens a block has, all of them the same; a written trace says it too."""
    rows = [GOOD | {"block_tokens": 256, "hash_ids": [0, 1, 2, 3, 4]}] * 2
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    trace = read(path)
    assert trace.block_tokens == 256 and len(trace.requests[0].keys) == 4
    write(tmp_path / "again.jsonl", trace)
    assert read(tmp_path / "again.jsonl") == replace(trace, name="again")
    for wrong, says in ((GOOD, "the lines before"), (rows[0] | {"block_tokens": 1}, "whole number from 16")):
        path.write_text(json.dumps(rows[0]) + "\n" + json.dumps(wrong))
        with pytest.raises(ConfigError, match=says):
            read(path)
