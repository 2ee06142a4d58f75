"""Recordings of an engine core, for servers that are not hotspan's: rows as hotspan's own server has them."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hotspan.engine.traces import block_keys

from .harness.core import Core, core

RECORDING, SECRET = "r" * 16, hashlib.blake2b(b"r" * 16, digest_size=32, person=b"hotspan-trace").digest()
BLOCK = 64
LENGTH = 900


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Core]:
    with core(tiny_model) as engine:
        yield engine


@pytest.fixture
def engine(running: Core) -> Iterator[Core]:
    yield running
    fetch(running, is_last=True)
    assert not running.administrator._traces._open


def preempted(engine: Core, prompt: list[int], **directives: Any) -> None:
    """Ask, and preempt it on its way; its blocks stay in the engine's own cache."""
    asked = engine.start("preempted", prompt, 8, **directives)
    engine.until(lambda: asked.num_output_tokens > 2, engine.step)
    engine.scheduler.running.remove(asked)
    engine.scheduler._preempt_request(asked, 0.0)
    engine.finish()
    assert asked.num_preemptions == 1


def fetch(engine: Core, *, is_last: bool = False, name: str = RECORDING) -> dict[str, Any]:
    return engine.administer(do="trace", recording=name, block_tokens=BLOCK, is_last=is_last)


def test_rows_are_those_that_hotspan_s_server_has(engine: Core) -> None:
    """Lengths, keys of the blocks, what was cached, and how it ended; each row is told once, and nothing before."""
    prompt, other = engine.text(1, LENGTH), engine.text(2, LENGTH)
    engine.ask(prompt)
    assert fetch(engine) == {"rows": [], "running": 0, "dropped": 0, "age_s": 0.0}
    cached = engine.ask(prompt, 3, salt="s")
    engine.stored(other)
    engine.ask(other, 2)
    first, second, third = fetch(engine)["rows"]
    assert first["hash_ids"] == block_keys(prompt, "s|", (), SECRET, BLOCK)
    assert second["hash_ids"] == third["hash_ids"] == block_keys(other, "None|", (), SECRET, BLOCK)
    assert [row["output_length"] for row in (first, second, third)] == [3, 1, 2]
    assert [row["cached_length"] for row in (first, second, third)] == [cached, 0, LENGTH // 128 * 128]
    for row in (first, second, third):
        assert row["input_length"] == LENGTH and row["block_tokens"] == BLOCK
        assert 0 <= row["ttft_ms"] <= row["duration_ms"] and row["timestamp"] >= 0
        assert row["finish_reason"] == "length"
    assert fetch(engine)["rows"] == []


def test_a_preempted_request_s_own_blocks_are_not_cached_ones(engine: Core) -> None:
    """Its row has what was cached when it came, though it finds its own blocks when it goes on."""
    prompt = engine.text(7, LENGTH)
    fetch(engine)
    preempted(engine, prompt)
    (row,) = fetch(engine)["rows"]
    assert row["cached_length"] == 0 and row["output_length"] == 8


def test_a_session_s_requests_have_its_key(engine: Core) -> None:
    """The same one in a recording; another in the next, and for another session."""
    found = []
    for name in (RECORDING, "another-recording"):
        fetch(engine, name=name)
        for session in ("a", "a", "b"):
            engine.ask(engine.text(3, LENGTH), session=session)
        rows = fetch(engine, is_last=True, name=name)["rows"]
        assert rows[0]["session"] == rows[1]["session"] != rows[2]["session"]
        found.append(rows[0]["session"])
    assert found[0] != found[1]


def test_who_has_no_token_has_no_row(engine: Core) -> None:
    """A request that is withdrawn while it waits is none; one that has answered is, as withdrawn."""
    fetch(engine)
    engine.start("waiting", engine.text(4, LENGTH))
    engine.core.abort_requests(["waiting"])
    engine.start("answered", engine.text(5, LENGTH), 50)
    engine.until(lambda: engine.answers.get("answered"), engine.step)
    assert fetch(engine)["running"] == 1
    engine.core.abort_requests(["answered"])
    engine.finish()
    (row,) = fetch(engine)["rows"]
    assert row["finish_reason"] == "abort" and row["output_length"] >= 1


def test_one_recording_at_a_time(engine: Core) -> None:
    """Another name is told nothing until the first has ended, and what is not recorded costs no memory."""
    fetch(engine)
    assert fetch(engine, name="another-recording") == {}
    fetch(engine, is_last=True)
    engine.ask(engine.text(6, LENGTH))
    assert fetch(engine, name="another-recording")["rows"] == []
    fetch(engine, is_last=True, name="another-recording")


def test_an_answer_that_a_stop_string_ended_is_no_abort(engine: Core) -> None:
    """vLLM's server finds the string and withdraws the request: how it ended is not told. Nothing is hashed of a
    request whose recording is over.
    """
    fetch(engine)
    asked = engine.start("stopped", engine.text(8, LENGTH), 50)
    assert asked.sampling_params is not None
    asked.sampling_params.stop = ["x"]
    engine.until(lambda: engine.answers.get("stopped"), engine.step)
    engine.core.abort_requests(["stopped"])
    engine.finish()
    (row,) = fetch(engine)["rows"]
    assert "finish_reason" not in row
    late = engine.start("late", engine.text(9, LENGTH), 50)
    engine.until(lambda: late.num_output_tokens, engine.step)
    fetch(engine, is_last=True)
    with patch("hotspan.engine.traces.block_keys", side_effect=AssertionError("hashed")):
        engine.core.abort_requests(["late"])
        engine.finish()
