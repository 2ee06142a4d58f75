"""Recorded requests: rows without text, keys that are equal where the text is, and no cost while nobody fetches."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import RequestOutputKind

from hotspan.cli.collecting import collect
from hotspan.cli.trace import write_rows
from hotspan.core.errors import ConfigError, NoAnswerError, RefusedError
from hotspan.core.recorded import RecordedServer, recorded_servers
from hotspan.core.trace import read
from hotspan.engine.traces import Traces, block_keys, section_keys
from hotspan.server.recording import Recording, with_servers

DELTA, FINAL = RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY
TEXT = list(range(1300))


def told(*at: int, running: int = 0, dropped: int = 0, **more: Any) -> dict[str, Any]:
    """An answer with rows of these times."""
    rows = [{"timestamp": each, "input_length": 1, "cached_length": 0} for each in at]
    return {"rows": rows, "running": running, "dropped": dropped} | more


class Time:
    """A clock that sleeps move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Server:
    """vLLM's client around one recorder, on a clock that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.traces = Traces(lambda: self.now)

    def asked(
        self,
        tokens: list[int],
        *,
        salt: str = "",
        media: Any = None,
        kind: RequestOutputKind = DELTA,
        session: str | None = None,
        ends: str | None = "stop",
    ) -> None:
        """A request of three tokens in two outputs, the first after a second."""

        async def generate() -> AsyncGenerator[Any, None]:
            asked = SimpleNamespace(prompt_token_ids=tokens, cache_salt=salt, lora_request=None, mm_features=media)
            self.traces.admitted(asked)  # type: ignore[arg-type]
            counts = (1, 2) if kind is DELTA else (3,)
            for n, count in enumerate(counts):
                self.now += 1
                reason = ends if n == len(counts) - 1 else None
                each = SimpleNamespace(token_ids=[0] * count, finish_reason=reason)
                times = SimpleNamespace(first_token_latency=0.25) if kind is FINAL else None
                yield SimpleNamespace(outputs=[each], num_cached_tokens=512, metrics=times)

        async def drain() -> None:
            async for _ in self.traces.followed(generate(), kind, session):
                pass

        asyncio.run(drain())


def test_a_row_has_times_lengths_and_keys() -> None:
    """In Mooncake's format, whether outputs are deltas or come once, with what the server found and took."""
    server = Server()
    assert server.traces.fetch("a") == {"rows": [], "running": 0, "dropped": 0, "age_s": 0.0}
    server.now += 5
    server.asked(TEXT)
    server.asked(TEXT, kind=FINAL)
    found = server.traces.fetch("a")
    assert found is not None
    first, second = found["rows"]
    assert (first["timestamp"], first["input_length"], first["output_length"]) == (5000, 1300, 3)
    assert (first["ttft_ms"], first["cached_length"], second["output_length"]) == (1000.0, 512, 3)
    assert (second["ttft_ms"], second["duration_ms"]) == (250.0, 1000.0), "a whole answer's first token came before"
    assert first["hash_ids"] == second["hash_ids"] and len(first["hash_ids"]) == 3
    assert server.traces.fetch("a") == {"rows": [], "running": 0, "dropped": 0, "age_s": 8.0}


def test_a_row_has_its_session_and_how_it_ended(tmp_path: Path) -> None:
    """Requests of a session share a key that no other recording has, and await each other when they are replayed."""
    server = Server()
    server.traces.fetch("a")
    server.asked(TEXT, session="tenant|mine")
    server.asked(TEXT, session="tenant|other", ends="length")
    server.now += 7
    server.asked(TEXT, session="tenant|mine", ends=None)
    server.asked(TEXT)
    found = server.traces.fetch("a", is_last=True)
    assert found is not None
    rows = found["rows"]
    assert [row["finish_reason"] for row in rows] == ["stop", "length", "abort", "stop"]
    assert rows[0]["session"] == rows[2]["session"] != rows[1]["session"] and "session" not in rows[3]
    assert [row["duration_ms"] for row in rows] == [2000.0] * 4
    assert "mine" not in json.dumps(rows)
    server.traces.fetch("b")
    server.asked(TEXT, session="tenant|mine")
    again = server.traces.fetch("b")
    assert again is not None and again["rows"][0]["session"] != rows[0]["session"]
    write_rows(tmp_path / "trace.jsonl", rows)
    trace = read(tmp_path / "trace.jsonl")
    assert [each.after for each in trace.requests] == [(), (), (0,), ()] and trace.requests[2].think_s == 9.0
    assert [each.finish_reason for each in trace.requests] == ["stop", "length", "abort", "stop"]


def test_keys_are_equal_where_everything_before_is() -> None:
    """Not behind a change, not with another salt or image, and not in another recording."""
    keys = block_keys(TEXT, "salt", (), b"s" * 32)
    changed = block_keys([*TEXT[:600], 0, *TEXT[601:]], "salt", (), b"s" * 32)
    assert changed[0] == keys[0] and not {*changed[1:]} & {*keys}
    assert not {*block_keys(TEXT, "other", (), b"s" * 32)} & {*keys}
    assert not {*block_keys(TEXT, "salt", (), b"t" * 32)} & {*keys}
    pictured = block_keys(TEXT, "salt", [(600, "cat")], b"s" * 32)
    assert pictured[0] == keys[0] and not {*pictured[1:]} & {*keys}
    assert block_keys(TEXT, "salt", [(600, "dog")], b"s" * 32)[1] != pictured[1]


def test_sections_are_named_by_their_own_text(tmp_path: Path) -> None:
    """Wherever they stand; not with another salt, nor in another recording. Short ones and prompts with media have
    none; without separators no row has any. What is written is read.
    """
    first, second, cut = list(range(300)), list(range(1000, 1200)), [9999, 9998]
    server = Server()
    server.traces.fetch("a")
    server.asked([*first, *cut, *second])
    server.traces.separators = [cut]
    for text in ([*first, *cut, *second], [7, 8, *cut, *second, *cut, *first]):
        server.asked(text)
    picture = SimpleNamespace(mm_position=SimpleNamespace(offset=0), identifier="cat")
    server.asked(first, media=[picture])
    server.asked(first, salt="other")
    found = server.traces.fetch("a")
    assert found is not None
    bare, row, other, pictured, salted = found["rows"]
    assert "sections" not in bare and "sections" not in pictured
    one, two = (key for *_, key in row["sections"])
    assert row["sections"] == [[0, 300, one], [302, 200, two]]
    assert other["sections"] == [[4, 200, two], [206, 300, one]]
    assert one != two and salted["sections"][0][2] not in (one, two)
    assert section_keys(first, "", [cut], b"s" * 32) != section_keys(first, "", [cut], b"t" * 32)
    write_rows(tmp_path / "own.jsonl", found["rows"])
    assert [each.start for each in read(tmp_path / "own.jsonl").requests[2].sections] == [4, 206]


def test_replicas_have_the_same_keys_in_one_recording() -> None:
    """And others in the next one: the keys are hashed with its name."""
    servers = [Server(), Server()]
    found = []
    for name in ("first", "second"):
        for server in servers:
            server.now += 31
            server.traces.fetch(name)
            server.asked(TEXT)
            fetched = server.traces.fetch(name)
            assert fetched is not None
            found.append(fetched["rows"][0]["hash_ids"])
    assert found[0] == found[1] and found[2] == found[3] and not {*found[0]} & {*found[2]}


def test_nothing_is_kept_while_nobody_fetches() -> None:
    """Without a recording outputs are passed on as they are; one that nobody fetches ends, and another may begin."""
    server = Server()
    outputs = object()
    assert server.traces.followed(outputs, DELTA) is outputs  # type: ignore[arg-type]
    assert server.traces.fetch("a") is not None and server.traces.fetch("b") is None
    server.now += 31
    assert server.traces.followed(outputs, DELTA) is outputs  # type: ignore[arg-type]
    assert server.traces.fetch("b") is not None


def test_what_does_not_fit_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows between two fetches are bounded by their keys."""
    monkeypatch.setattr("hotspan.engine.traces._MAX_KEYS", 5)
    server = Server()
    server.traces.fetch("a")
    for _ in range(3):
        server.asked(TEXT)
    found = server.traces.fetch("a")
    assert found is not None and len(found["rows"]) == 1 and found["dropped"] == 2


def test_a_recording_that_nobody_fetches_takes_nothing() -> None:
    """A request that began in it and ends when it is over is no row, and none that was dropped."""
    server = Server()
    server.traces.fetch("a")
    found = server.traces.active()
    assert found is not None and server.traces.takes(found, len(TEXT))
    server.now += 31
    assert not server.traces.takes(found, len(TEXT)) and not found.dropped


def test_a_client_that_goes_leaves_its_row() -> None:
    """A stream that is closed after its first output is a request with what was answered; one before it is none."""
    server = Server()
    server.traces.fetch("a")
    closed = []

    async def generate() -> AsyncGenerator[Any, None]:
        try:
            asked = SimpleNamespace(prompt_token_ids=TEXT, cache_salt="", lora_request=None, mm_features=None)
            server.traces.admitted(asked)  # type: ignore[arg-type]
            while True:
                yield SimpleNamespace(
                    outputs=[SimpleNamespace(token_ids=[0], finish_reason=None)], num_cached_tokens=None
                )
        finally:
            closed.append(True)

    async def leave() -> None:
        followed = server.traces.followed(generate(), DELTA)
        await anext(followed)
        assert server.traces.fetch("a") == {"rows": [], "running": 1, "dropped": 0, "age_s": 0.0}
        await followed.aclose()

    asyncio.run(leave())
    found = server.traces.fetch("a")
    assert closed and found is not None and found["running"] == 0 and found["rows"][0]["output_length"] == 1


def test_a_file_is_sorted_and_can_be_simulated(tmp_path: Path) -> None:
    """Rows come when requests end and are written by their beginnings; the file is a trace with what was recorded."""
    server, clock = Server(), Time()

    def post(path: str, body: dict[str, Any]) -> Any:
        assert path == "/hotspan/trace"
        assert "block_tokens" not in body, "the server has chunks of its own"
        found = server.traces.fetch(body["recording"], is_last=body["is_last"])
        return found | ({"servers": [{"model": "m", "ram": 1}]} if body["is_last"] and found is not None else {})

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        server.now += 20
        server.asked(TEXT)
        server.now -= 10  # the next one began earlier
        server.asked(TEXT[:600])

    rows, lost, silent, servers, interrupted = collect({"a": post}, 2.0, clock=clock, sleep=sleep)
    assert not interrupted
    assert servers == [{"model": "m", "ram": 1}]
    assert len(rows) == 4 and (lost, silent) == (0, []) and rows == sorted(rows, key=lambda row: row["timestamp"])
    write_rows(tmp_path / "own.jsonl", rows, servers)
    trace = read(tmp_path / "own.jsonl")
    assert trace.servers == (RecordedServer("m"),)
    assert trace.requests[0].at_s == 0 and trace.facts().recorded_ttft_s == 1.0
    assert trace.facts().recorded_hit_rate == pytest.approx(4 * 512 / (2 * 1300 + 2 * 600))
    assert server.traces.fetch("another") is not None, "the last fetch has ended the recording"
    assert not any("token" in json.loads(line) for line in (tmp_path / "own.jsonl").read_text().splitlines())


def test_a_server_that_ends_leaves_what_it_has_told() -> None:
    """It is named, and not asked again; one that can't be asked at first is an error."""
    asked = []

    def ends(path: str, body: dict[str, Any]) -> Any:
        asked.append(body)
        if len(asked) > 1:
            raise ConfigError("http://x can't be asked")
        return told(1)

    def lasts(path: str, body: dict[str, Any]) -> Any:
        return told(2)

    clock = Time()
    found = collect({"a": ends, "b": lasts}, 2.5, clock=clock, sleep=clock.sleep)
    assert [row["timestamp"] for row in found.rows] == [1, 2, 2, 2, 2] and len(asked) == 2
    assert found.silent == ["http://x can't be asked"]
    with pytest.raises(ConfigError, match="http://x"):
        collect({"a": ends}, 3.5)


def test_an_interrupt_ends_a_recording() -> None:
    """With what came until then, the last fetch included, and how many requests are missing."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    posts = dict.fromkeys("ab", lambda path, body: told(1, running=2, dropped=1))
    rows, lost, *_ = collect(posts, 60, sleep=interrupted)
    assert (len(rows), lost) == (4, 6)


def test_blocks_of_another_size(tmp_path: Path) -> None:
    """The first fetch says how many tokens a key stands for; the file says it too, and can be simulated."""
    server = Server()
    server.traces.fetch("a", 128)
    server.asked(TEXT)
    found = server.traces.fetch("a")
    assert found is not None and len(found["rows"][0]["hash_ids"]) == 11
    write_rows(tmp_path / "own.jsonl", found["rows"])
    trace = read(tmp_path / "own.jsonl")
    assert trace.block_tokens == 128 and len(trace.requests[0].keys) == 10


def test_servers_with_other_chunks_are_not_mixed() -> None:
    """A file has blocks of one size: the line says which there are, and how to have one."""

    def post(tokens: int) -> Any:
        row = told(1)["rows"][0] | {"block_tokens": tokens}
        return lambda path, body: told() | {"rows": [row]}

    with pytest.raises(ConfigError, match=r"chunks of \[128, 256\] tokens: give one size for all as --block-tokens"):
        collect({"a": post(256), "b": post(128)}, 0.0)


@pytest.mark.parametrize(
    ("asked", "chunk_tokens", "tokens"), [(None, 256, 256), (None, None, 512), (None, 8, 16), (64, 256, 64)]
)
def test_blocks_are_chunks_unless_another_size_is_asked_for(
    asked: int | None, chunk_tokens: int | None, tokens: int
) -> None:
    """Within the bounds of a file; without tiers as in published traces."""
    assert Recording(recording="r" * 16, block_tokens=asked).tokens_of_blocks(chunk_tokens) == tokens


def test_the_last_answer_has_each_engine_core() -> None:
    """With its tiers and rates; without tiers as many as the server has cores, and always the rows."""
    last = {"rows": [1], "running": 0, "dropped": 0, "server": {"model": "m"}, "engines": 2}
    stats = {
        "chunk_tokens": 256,
        "token_bytes": 100.0,
        "rates": {"prefill_tokens_per_s": 7.0},
        "tiers": {"ram": {"capacity_bytes": 5, "chunks": 1}},
    }
    found = with_servers(last, [stats, stats])
    server = {"model": "m", "chunk_tokens": 256, "token_bytes": 100.0, "tier_bytes": {"ram": 5}}
    assert found == {"rows": [1], "running": 0, "dropped": 0, "servers": [server | stats["rates"]] * 2}
    read_back = recorded_servers(found, "x")
    assert read_back[0].tier_bytes == {"ram": 5.0} and read_back[0].prefill_tokens_per_s == 7.0
    assert with_servers(last, [])["servers"] == [{"model": "m"}] * 2


def test_the_replicas_of_a_router_are_recorded() -> None:
    """Rows of all that answer, also in the router's answer with an error; who did not is named; one may answer none."""

    def answer(replica: str, at: int) -> dict[str, Any]:
        return {"replica": replica, "status": 200, "body": told(at, running=1)}

    clock = Time()
    complete = {"is_complete": True, "replicas": [answer("a", 2), answer("b", 1)]}
    partial = {"is_complete": False, "replicas": [answer("a", 3), {"replica": "b", "status": 503, "body": None}]}
    answers = iter((complete, partial))

    def post(path: str, body: dict[str, Any]) -> Any:
        if (found := next(answers)) is partial:
            raise RefusedError("502", found)
        return found

    rows, lost, silent, *_ = collect({"r": post}, 1.0, clock=clock, sleep=clock.sleep)
    assert [row["timestamp"] for row in rows] == [1, 2, 3] and (lost, silent) == (1, ["b"])

    def refused(path: str, body: dict[str, Any]) -> Any:
        raise RefusedError("409", {"replicas": [{"replica": "a", "status": 409, "body": None}]})

    with pytest.raises(RefusedError):
        collect({"r": refused}, 1.0)


BUSY = RefusedError("http://x refused: the engine gave no answer", None, 503)
GONE = ConfigError("http://x can't be asked (refused)")


class Scripted:
    """A server that answers as it is told, or raises; then with no row. `asked`: the bodies."""

    def __init__(self, *answers: Any) -> None:
        self.answers = [*answers]
        self.asked: list[dict[str, Any]] = []

    def __call__(self, path: str, body: dict[str, Any]) -> Any:
        self.asked.append(body)
        answer = self.answers.pop(0) if self.answers else told()
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.mark.parametrize("error", [BUSY, NoAnswerError("http://x can't be asked (timed out)")])
def test_a_busy_server_is_asked_again(error: Exception) -> None:
    """After a 503, or no answer in time: it is named, and its later rows are there."""
    clock, server = Time(), Scripted(told(1), error, told(2))
    found = collect({"a": server}, 3.0, clock=clock, sleep=clock.sleep)
    assert [row["timestamp"] for row in found.rows] == [1, 2] and found.silent == ["a"] and len(server.asked) == 4


def test_a_server_that_is_busy_at_the_end_is_asked_twice_for_its_last_rows() -> None:
    """Its last rows, and what it is, are worth a second; one that has ended its recording is not asked again."""
    clock, other = Time(), Scripted()
    server = Scripted(told(1), BUSY, told(2, servers=[{"model": "m"}]))
    found = collect({"a": server, "b": other}, 1.0, clock=clock, sleep=clock.sleep)
    assert [row["timestamp"] for row in found.rows] == [1, 2] and found.servers == [{"model": "m"}]
    assert [body["is_last"] for body in server.asked] == [False, True, True]
    assert [body["is_last"] for body in other.asked] == [False, True]


@pytest.mark.parametrize("error", [GONE, RefusedError("refused: no admin", None, 403)])
def test_a_recording_without_servers_ends(error: Exception) -> None:
    """At once, with what is there: nobody waits for a time that nobody records."""
    clock, server = Time(), Scripted(told(1), error)
    found = collect({"a": server}, 3600.0, clock=clock, sleep=clock.sleep)
    assert len(found.rows) == 1 and found.silent == [str(error)] and len(server.asked) == 2 and clock.now == 1.0


def test_all_servers_are_asked_at_once() -> None:
    """One that takes long does not keep the others from being fetched in time."""
    both = threading.Barrier(2)

    def post(path: str, body: dict[str, Any]) -> Any:
        both.wait(timeout=20)
        return told()

    assert collect({"a": post, "b": post}, 0.0).silent == []


def test_a_recording_that_began_again_is_said() -> None:
    """Its rows stay in order, on the time axis of the first: the gap is there, and what ran before it is missing."""
    clock, server = Time(), Server()
    waits = iter((1.0, 40.0, 1.0))

    def post(path: str, body: dict[str, Any]) -> Any:
        return server.traces.fetch(body["recording"], is_last=body["is_last"])

    def sleep(seconds: float) -> None:
        wait = next(waits)
        server.asked(TEXT)  # two seconds
        server.now += wait - 2
        clock.now += wait

    found = collect({"a": post}, 42.0, clock=clock, sleep=sleep)
    assert [row["timestamp"] for row in found.rows] == [0, 41_000] and found.interrupted == ["a"]


@pytest.mark.parametrize(
    ("ages", "interrupted"),
    [
        ((0.0, 1.0, 2.0), []),
        ((0.0, 0.5, 1.0), []),  # within the slack
        ((5.0, 3.0, 4.0), ["a"]),  # younger than before
        ((0.0, 1.0, 1.0), []),
        ((0.0, 0.0, 0.5), []),
        ((0.0, None, None), []),  # an older server
    ],
)
def test_a_younger_recording_is_another(ages: tuple[float | None, ...], interrupted: list[str]) -> None:
    """Than it was, or than it would be now by more than clocks differ; a server without an age can't be judged."""
    clock = Time()
    answers = [told(0) | ({} if age is None else {"age_s": age}) for age in ages]
    found = collect({"a": Scripted(*answers)}, 2.0, clock=clock, sleep=clock.sleep)
    assert found.interrupted == interrupted and len(found.rows) == 3


def test_a_restart_whose_answer_was_lost_is_found_by_its_age() -> None:
    """The recording has its age again, but not the one that it would have: its beginning is found from it."""
    clock = Time()
    lost = NoAnswerError("late")
    answers = (told(0, age_s=0.0), told(900, age_s=1.0, running=2), lost, told(100, 1500, age_s=2.0), told(age_s=3.0))
    waits = iter((1.0, 50.0, 2.0, 1.0))

    def sleep(seconds: float) -> None:
        clock.now += next(waits)

    found = collect({"a": Scripted(*answers)}, 54.0, clock=clock, sleep=sleep)
    assert [row["timestamp"] for row in found.rows] == [0, 900, 51_100, 52_500]
    assert found.interrupted == ["a"] and found.lost == 2 and found.silent == ["a"]


def test_a_replica_that_comes_later_is_on_the_same_time_axis() -> None:
    """Behind a router its recording begins with its first answer: its times count from there."""

    def answer(**ages: float) -> dict[str, Any]:
        return {
            "replicas": [{"replica": each, "status": 200, "body": told(0, age_s=age)} for each, age in ages.items()]
        }

    clock = Time()
    found = collect({"r": Scripted(answer(x=0.0), answer(x=1.0, y=0.0))}, 1.0, clock=clock, sleep=clock.sleep)
    assert [row["timestamp"] for row in found.rows] == [0, 0, 1000] and not found.interrupted


@pytest.mark.parametrize(
    "answer",
    [
        {"ok": 1},
        [1],
        1,
        None,
        "text",
        {"rows": [{"input_length": 1, "cached_length": 0}], "running": 0, "dropped": 0},
        {"rows": [1], "running": 0, "dropped": 0},
        {"rows": [], "running": "0", "dropped": 0},
        {"rows": [], "running": 0, "dropped": 0, "age_s": None},
        {"rows": [], "running": 0, "dropped": 0, "servers": 5},
        {"replicas": [1]},
        {"replicas": [{"replica": "a", "status": 200, "body": {"ok": 1}}]},
        {"replicas": [{"replica": "a"}]},
        {"replicas": 1},
    ],
)
def test_the_answer_of_another_server_is_said(answer: Any) -> None:
    """Whatever its JSON is: an error at first, and later it is left out with what it had told."""
    with pytest.raises(ConfigError, match="a does not answer as hotspan does"):
        collect({"a": Scripted(answer)}, 1.0)
    clock = Time()
    found = collect({"a": Scripted(told(1), answer)}, 9.0, clock=clock, sleep=clock.sleep)
    assert len(found.rows) == 1 and "does not answer as hotspan does" in found.silent[0] and clock.now == 1.0


def test_begun_recordings_end_if_one_can_not_be_asked() -> None:
    """So that the next try is not refused, for 30 s, by what the first one has begun."""
    server = Server()

    def post(path: str, body: dict[str, Any]) -> Any:
        return server.traces.fetch(body["recording"], is_last=body["is_last"])

    with pytest.raises(ConfigError, match="can't be asked"):
        collect({"a": post, "b": Scripted(GONE)}, 60.0)
    assert server.traces.fetch("another") is not None


def test_a_second_interrupt_ends_the_last_fetch() -> None:
    """What was collected stays, and who did not answer is named."""
    asked = threading.Event()

    def post(path: str, body: dict[str, Any]) -> Any:
        if body["is_last"]:
            os.kill(os.getpid(), signal.SIGINT)
            asked.wait(timeout=20)
        return told(1)

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    found = collect({"a": post}, 60, sleep=interrupted)
    asked.set()
    assert len(found.rows) == 1 and found.silent == ["a"]


def test_an_interrupt_loses_no_answer_that_is_on_its_way() -> None:
    """The rows that a server has given away are awaited and kept before it is asked for its last ones."""
    last, order, was_asked = threading.Event(), [], []

    def post(path: str, body: dict[str, Any]) -> Any:
        if body["is_last"]:
            last.set()
        else:
            os.kill(os.getpid(), signal.SIGINT)
            was_asked.append(last.wait(timeout=0.3))
        order.append(body["is_last"])
        return told(2 if body["is_last"] else 1)

    assert [row["timestamp"] for row in collect({"a": post}, 60).rows] == [1, 2]
    assert order == [False, True] and was_asked == [False], "the last rows are asked for after the answer"


def test_a_recording_that_began_again_just_before_the_end_is_said() -> None:
    """Less than the clocks' slack after the fetch before: what was told is older than what there is."""
    clock = Time()
    found = collect({"a": Scripted(told(0, age_s=0.4), told(0, age_s=0.0))}, 0.5, clock=clock, sleep=clock.sleep)
    assert found.interrupted == ["a"]
